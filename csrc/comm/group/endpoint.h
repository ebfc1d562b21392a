// One rank among the others: its arena, the mapped arenas of its host, its network
// connections to ranks of other hosts, its doorbell, and which ranks are still alive.
//
// A rank that has connections sleeps on them (epoll) and on an eventfd, of which its local peers
// (the other ranks of its host) have a copy: they ring by both, the word in memory and the eventfd.
//
// Communicators (the one of init() and all that are split from it) share the endpoint; it lives as
// long as any of them or of their operations.
//
// Threads: immutable after construction but for the liveness flags (atomics, set once), the trace
// recorder (its own rules), and how often a thread met peers on its processor, which is under the
// engine's progress lock.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/fork_guard.h"
#include "comm/group/failure.h"
#include "comm/group/trace.h"
#include "comm/memory/arena.h"
#include "comm/memory/control.h"
#include "comm/memory/peer_memory.h"
#include "comm/network/network.h"
#include "comm/rendezvous/meet_tcp.h"
#include "comm/rendezvous/rendezvous.h"

namespace dpcore {

enum class RankKind { processes, threads };  // what a rank is

class Endpoint {
 public:
  // Meets the other ranks. `control_bytes` are set aside for the first communicator and made
  // ready by `prepare_control` before any peer can see them. With `tcp` ranks may be on several
  // hosts; TcpOptions says whether those of one host share memory.
  static std::shared_ptr<Endpoint> meet(RankKind how, const Rendezvous& rendezvous,
                                        const TcpOptions* tcp, size_t control_bytes,
                                        const std::function<void(std::byte*)>& prepare_control);
  ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // A hash of the name that its ranks met by.
  uint64_t job() const { return job_; }
  static uint64_t job_of(const std::string& name);
  int rank() const { return rank_; }
  int world() const { return static_cast<int>(peers_.size()); }
  Arena& arena() { return *arena_; }
  TraceRecorder& trace() { return trace_; }
  Doorbell& bell() { return *peers_[rank_].bell; }
  bool shares_process() const { return shares_process_; }  // ranks are threads
  // How many ranks, this one among them, may run on the processors that this one may use.
  int sharers() const { return sharers_; }
  // More than there are processors: never spin.
  bool oversubscribed() const { return oversubscribed_; }

  // Whether this rank may read the ordinary memory of all its local peers, and how.
  bool reads_local_peers() const { return reads_local_peers_; }
  const ReadableProcess& readable(int r) const { return peers_[r].readable; }

  // nullptr when every rank is reached through memory.
  Network* network() const { return network_.get(); }
  bool is_remote(int r) const { return !peers_[r].view; }
  // Whether all ranks have the same address, so that nothing leaves the machine, and none pretends
  // to be on another host. The same answer on all ranks.
  bool is_one_machine() const { return is_one_machine_; }
  // What the ranks agreed to expect of machine and network.
  const CostConstants& costs() const { return costs_; }
  // The lowest rank of r's host: equal for local peers.
  int host_of(int r) const { return peers_[r].host; }

  // Sleeps until the own bell rings, the network has something, or the time is over. `seen` is
  // what announce_sleep() said.
  void sleep(uint32_t seen, int64_t nanoseconds);
  // Records at the own bell which processor this thread is on.
  int record_processor();
  // A local peer that was last on the processor of this thread, as happens beside other load, can't
  // come while this thread looks for it. Where they met there again and again, this thread leaves
  // for another processor. Whether no peer is on its processor by now. Under the progress lock.
  bool part_from_peers();
  // Whether ranks take turns on processors, and local rank r was last on that of this thread.
  bool takes_turns_with(int r) {
    return oversubscribed_ &&
           record_processor() == peers_[r].bell->processor.load(std::memory_order_relaxed);
  }
  // Wakes this process's own threads, wherever they sleep.
  void wake_own_threads();

  // Of a rank that shares memory with this one.
  const ArenaView& arena_of(int r) const { return *peers_[r].view; }
  // Wakes r; remote ranks are woken by frames. What r is to find is published, and
  // Doorbell::fence_before_poll() was called.
  void ring_if_asleep(int r) const {
    if (peers_[r].bell->has_sleeper()) {
      ring(r);
    }
  }
  void ring(int r) const;
  int32_t process_of(int r) const { return peers_[r].process; }
  uint64_t root_control_offset_of(int r) const;

  // Looks at the pidfds (one poll) and at lost connections; dead(r) says what was seen so far. Any
  // thread.
  void look_for_deaths();
  bool dead(int r) const { return peers_[r].dead.load(std::memory_order_acquire); }

  // What went wrong first in the communicators that share this endpoint, or in the program itself.
  // Peers that still need this rank in another communicator hear of it when it leaves that one.
  // `culprit`: rank in the endpoint.
  const FirstFailure& first_failure() const { return first_failure_; }
  void record_failure(ErrorKind kind, int culprit, const std::string& what) {
    first_failure_.set({make_record(kind, culprit, rank_, 0, what), what}, [] {});
  }
  void record_program_error(const std::string& error) {
    record_failure(ErrorKind::peer_lost, rank_, error);
  }

  // Whether r's process has ended for certain: it is not only out of reach, and did not only leave.
  // To be asked of one that is dead(r).
  bool has_ended(int r) const { return !is_remote(r) || network_->was_closed_there(r); }
  // Gives back the memory of ranks of this host that have ended, but for their first control
  // blocks. No operation of any rank may need it any more.
  void drop_pages_of_ended(size_t control_bytes);
  // Where this rank listened for ranks of other hosts; empty if there were to be none.
  const std::string& address() const { return address_; }

  // How r's end showed, for messages: "died", "is out of reach: ...".
  std::string how_it_ended(int r) const;

  // This process was forked off the one that made the endpoint.
  bool is_forked_copy() const { return origin_.is_forked_copy(); }

 private:
  Endpoint() = default;
  bool leaves_peers();
  void take_in(int r, LocalPeer& present);
  void count_if_sharer(int r, int32_t process);
  bool try_to_read_local_peers();
  void connect(RankKind how, const Rendezvous& rendezvous, const TcpOptions& tcp,
               std::vector<LocalPeer>& present);

  struct Peer {
    std::shared_ptr<ArenaView> view;
    Doorbell* bell = nullptr;
    Descriptor pidfd;
    Descriptor wake_event;
    int32_t process = 0;
    ReadableProcess readable;
    int host = 0;
    std::atomic<bool> dead{false};
  };

  uint64_t job_ = 0;
  int rank_ = 0;
  int sharers_ = 1;
  bool oversubscribed_ = false;
  bool shares_process_ = false;
  bool reads_local_peers_ = false;
  bool is_one_machine_ = false;
  CostConstants costs_;
  std::string address_;
  fork_guard::Origin origin_;
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<std::byte> control_block_;
  std::vector<Peer> peers_;
  std::unique_ptr<Network> network_;
  Doorbell bell_of_remote_;  // no thread sleeps on it: frames wake remote ranks
  TraceRecorder trace_;
  int meetings_here_ = 0;  // with a peer, on the processor of this thread
  uint32_t rings_then_ = 0;
  int64_t leaves_again_ns_ = 0;
  FirstFailure first_failure_;
};

}  // namespace dpcore
