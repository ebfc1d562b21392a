// Ranks that are threads meet in a table of this process. The last rank that leaves a rendezvous,
// finished or failed, takes it off the table, so its name can be used again.
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/rendezvous/rendezvous.h"

namespace dpcore {
namespace {

struct InprocRendezvous {
  int world = 0;
  int inside = 0;
  int arrived = 0;
  bool failed = false;
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<CostConstants> costs;
  std::vector<Descriptor> wake_events;  // copies, and copied for every rank that needs one
};

std::mutex table_mutex;
std::condition_variable table_changed;
std::map<std::string, std::shared_ptr<InprocRendezvous>>& table() {
  static auto* all = new std::map<std::string, std::shared_ptr<InprocRendezvous>>;
  return *all;
}

std::string missing_ranks(const InprocRendezvous& entry) {
  std::string list;
  for (int r = 0; r < entry.world; ++r) {
    if (!entry.arenas[r]) {
      list += (list.empty() ? "" : ", ") + std::to_string(r);
    }
  }
  return list;
}

}  // namespace

std::vector<LocalPeer> meet_inproc(const Rendezvous& rendezvous, std::shared_ptr<Arena> arena,
                                   int wake_event) {
  std::unique_lock<std::mutex> lock(table_mutex);
  auto& listed = table()[rendezvous.name];
  if (!listed) {
    listed = std::make_shared<InprocRendezvous>();
    listed->world = rendezvous.world;
    listed->arenas.resize(rendezvous.world);
    listed->costs.resize(rendezvous.world);
    listed->wake_events.resize(rendezvous.world);
  }
  const std::shared_ptr<InprocRendezvous> entry = listed;
  if (entry->world != rendezvous.world) {
    throw RendezvousError("rank " + std::to_string(rendezvous.rank) + ": world size " +
                          std::to_string(rendezvous.world) + " here, " +
                          std::to_string(entry->world) + " on the ranks that came before");
  }
  if (entry->arenas[rendezvous.rank]) {
    throw RendezvousError("rank " + std::to_string(rendezvous.rank) + " came twice to '" +
                          rendezvous.name + "'; give every thread a rank of its own");
  }
  entry->arenas[rendezvous.rank] = std::move(arena);
  entry->costs[rendezvous.rank] = rendezvous.costs;
  entry->wake_events[rendezvous.rank] = copy_of(wake_event);
  ++entry->arrived;
  ++entry->inside;
  table_changed.notify_all();

  const auto leave = [&] {
    if (--entry->inside == 0) {
      table().erase(rendezvous.name);
    }
  };
  while (entry->arrived < entry->world && !entry->failed) {
    table_changed.wait_for(lock, std::chrono::milliseconds(20));
    if (entry->arrived < entry->world && now_ns() > rendezvous.deadline_ns) {
      entry->failed = true;
    }
    try {
      if (rendezvous.interrupted) {
        lock.unlock();
        rendezvous.interrupted();
        lock.lock();
      }
    } catch (...) {
      lock.lock();
      entry->failed = true;
      leave();
      table_changed.notify_all();
      throw;
    }
  }
  if (entry->failed) {  // also where the last one comes after another one has given up
    const std::string missing = missing_ranks(*entry);
    leave();
    table_changed.notify_all();
    throw RendezvousError("rank " + std::to_string(rendezvous.rank) + ": " +
                          std::to_string(entry->arrived) + " of " + std::to_string(entry->world) +
                          " ranks came" +
                          (missing.empty() ? ", the last one too late" : "; missing: " + missing));
  }
  std::vector<LocalPeer> peers(rendezvous.world);
  for (int r = 0; r < rendezvous.world; ++r) {
    peers[r].rank = r;
    peers[r].process = getpid();
    peers[r].costs = entry->costs[r];
    if (r != rendezvous.rank) {
      peers[r].local = entry->arenas[r];
      peers[r].wake_event = copy_of(entry->wake_events[r].get());
    }
  }
  leave();
  return peers;
}

}  // namespace dpcore
