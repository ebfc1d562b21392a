// How ranks find each other and hand over their arenas.
//
// A rendezvous has a name (the job and which of its communicators), a rank and a world. When it
// returns, every rank holds every other rank's arena and a handle that tells its death. One that
// fails throws a RendezvousError that names the ranks that did not come.
//
//   meet_inproc   ranks are threads of this process: arenas are passed by pointer
//   meet_unix     ranks are processes of this host: rank 0 listens on an abstract Unix socket
//                 (no file, no port), every rank sends its memfd and its pidfd, rank 0 sends
//                 all of them back to all. Both ends check that the other has the same user.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/fork_guard.h"
#include "comm/memory/arena.h"
#include "comm/schedule/cost.h"

namespace dpcore {

struct Rendezvous {
  std::string name;
  int rank = 0;
  int world = 1;
  int64_t deadline_ns = 0;
  std::function<void()> interrupted;  // called now and then; throws to give up (Ctrl-C)
  CostConstants costs = {};           // of this machine: all take those of rank 0
  std::vector<int> members = {};      // ranks in the world, where not all of it takes part

  std::string name_of(int r) const {
    return "rank " + std::to_string(members.empty() ? r : members[static_cast<size_t>(r)]);
  }
};

struct LocalPeer {
  int rank = 0;
  int32_t process = 0;
  uint64_t first_bytes = 0;
  Descriptor memfd;
  Descriptor pidfd;              // empty for ranks of this process
  Descriptor wake_event;         // of a rank that sleeps on a network as well
  std::shared_ptr<Arena> local;  // instead of memfd for ranks of this process
  CostConstants costs;
};

// Both return world entries; the own one is empty but for its rank and costs. `wake_event` (an
// eventfd) goes to the others with the arena; -1: this rank has none, and so have the others.
std::vector<LocalPeer> meet_inproc(const Rendezvous& rendezvous, std::shared_ptr<Arena> arena,
                                   int wake_event = -1);
std::vector<LocalPeer> meet_unix(const Rendezvous& rendezvous, const Arena& arena,
                                 int wake_event = -1);

}  // namespace dpcore
