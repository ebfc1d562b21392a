// The members of one communicator as one of them sees it: where each rank's control block
// lies, which rank failed and why, and what each did last.
//
// Threads: ranks, offsets and pointers never change. fail() may be called by any thread; the
// first failure stays (failure.h) and is told to all peers before the caller does anything else.
// The history is written by the thread that drives the operations (one at a time, see engine.h).
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/error.h"
#include "comm/group/agreement.h"
#include "comm/group/endpoint.h"
#include "comm/group/failure.h"
#include "comm/group/remote_members.h"
#include "comm/memory/control.h"

namespace dpcore {

class Group {
 public:
  // `members[r]` is the endpoint rank of rank r; `offsets[r]` where its control block lies in
  // its arena (of a remote rank it counts nothing). `own_block` keeps ours when it was allocated
  // for this group. `remote` are the members reached by TCP, from meet_remote().
  Group(std::shared_ptr<Endpoint> endpoint, std::vector<int> members, int rank,
        const std::vector<uint64_t>& offsets, std::shared_ptr<std::byte> own_block,
        std::unique_ptr<RemoteMembers> remote);
  // Ready to receive frames of the group, before any member can send one; nullptr when all
  // members share memory. `id` names the group in frames, alike on all members.
  static std::unique_ptr<RemoteMembers> meet_remote(const Endpoint& endpoint,
                                                    const std::vector<int>& members, int rank,
                                                    uint64_t id);
  static size_t control_bytes(int world);
  // Which rank and group a control block belongs to: see ControlBlock.
  struct Names {
    uint64_t job = 0;
    uint64_t group = 0;
    int member = 0;
  };
  // Makes zeroed memory a control block; to be done before peers may look.
  static void prepare_control(std::byte* at, int rank, int world, const Names& names);

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(members_.size()); }
  int member(int r) const { return members_[r]; }
  Endpoint& endpoint() const { return *endpoint_; }
  std::shared_ptr<Endpoint> endpoint_ptr() const { return endpoint_; }

  ControlBlock& control(int r) const { return *controls_[r]; }
  ControlBlock& mine() const { return *controls_[rank_]; }
  // In r's arena, or in what is kept here of a remote member.
  std::byte* at(int r, uint64_t offset) const {
    const ArenaView* arena = arenas_[r];
    return arena != nullptr ? arena->at(offset) : remote_->base(r) + offset;
  }
  OperationSlot& slot(int r, uint64_t number) const { return controls_[r]->slot(number); }
  // Offsets of r's mailboxes towards each peer, in r's arena; 0 = not made yet.
  std::atomic<uint64_t>* mailboxes(int r) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(controls_[r] + 1);
  }

  // The members that share no memory with this rank; nullptr when there are none.
  RemoteMembers* remote() const { return remote_.get(); }
  bool is_remote(int r) const { return remote_ && remote_->contains(r); }
  // How its members reach each other: "inproc", "shm", "tcp", or "shm+tcp" where some share a host.
  const char* transport() const;
  // Whether another member is on the same host.
  bool has_local_peers() const;
  // Operations of up to so many bytes travel with the word that a rank has entered.
  size_t small_bytes() const;
  // By rank: the same number for members that share memory, and the smaller one for the host
  // whose first member has the smaller rank.
  std::vector<int> hosts() const;

  // Makes r look at what was published: frames to it leave, or its bell rings if it sleeps.
  void ring(int r) const {
    if (is_remote(r)) {
      remote_->flush(r);
      return;
    }
    Doorbell::fence_before_poll();
    endpoint_->ring_if_asleep(members_[r]);
  }
  void ring_others() const;

  const FirstFailure& failure() const { return failure_; }
  bool failed() const { return failure_.is_set(); }
  // `operation`: number + 1 of the collective that failed, where it was one.
  void fail(ErrorKind kind, int culprit, const std::string& reason, uint64_t operation = 0) {
    fail(make_record(kind, culprit, rank_, operation, reason), reason);
  }
  // The program of this rank ends it, so it knows: "gave up: ...", "was interrupted during ...".
  void give_up(const std::string& how, uint64_t operation = 0);
  // Whether r has published that the group failed there.
  bool has_failed(int r) const {
    return control(r).abort.state.load(std::memory_order_acquire) == AbortRecord::why_it_failed;
  }
  // Takes over the earliest failure that a peer has published. True when there was one.
  bool adopt_failure_of_peer();
  // For a thread that waits for all peers: whether the group failed by now. It fails if a peer has
  // published a failure, or has died without leaving; `during` is what this rank waits in.
  bool fails_during(const std::string& during);
  // No operation will follow from here, and no look at a peer's memory. If another group of this
  // rank has failed, or an error ends its program, that is told as the reason.
  void leave();
  // Makes the error because of which r left, elsewhere in its program, the failure of this one.
  // False when r left for another reason.
  bool adopt_why_it_left(int r, const std::string& missed);
  // Every peer has left or died: none reads this rank's blocks any more.
  bool all_peers_left() const;
  std::shared_ptr<std::byte> take_own_block() { return std::move(own_block_); }
  bool has_left(int r) const { return control(r).left.load(std::memory_order_acquire) != 0; }
  bool is_dead(int r) const { return endpoint_->dead(members_[r]); }

  // Publishes what this rank says while the ranks agree on which of them go on.
  void say(const Ballot& ballot);
  // What can be known of the others' ballots and lives now. By one thread.
  BallotView look_at_ballots();

  void finish_operation(uint64_t number);
  // This rank waits, and is neither stopped nor cut off.
  void show_life(int64_t now);
  // And it waits for this message; of several, the first one is shown.
  void show_message(bool sends, int peer, uint64_t tag, uint64_t bytes, int64_t since, int64_t now);
  // Where the program of this rank is, and how long: for `dpcore inspect` while it hangs. Ranks of
  // other hosts are told when no operation was entered since the last call. By one thread.
  void show_placement(const std::string& where, int64_t since, int64_t now);
  // "operation 41 (all_reduce of 1000 x float32, sum), finished 3.2 s ago", from r's black box.
  std::string last_operation_of(int r) const;
  static std::string describe(uint64_t number, const Fingerprint& what);
  static std::string describe_message(bool sends, int peer, uint64_t tag, uint64_t bytes);

  std::atomic<uint32_t> in_flight{0};  // operations of this group, counted by the engine
  // close() waits until then for what is in flight; the rest fails.
  std::atomic<int64_t> closes_at_ns{INT64_MAX};

 private:
  void fail(const FailureRecord& record, const std::string& reason);
  std::string if_completed_here(const FailureRecord& record) const;
  std::string message_of(int r) const;
  std::string name() const;
  std::string in_words_of(int reporter, const std::string& reason) const;

  std::shared_ptr<Endpoint> endpoint_;
  std::vector<int> members_;
  int rank_;
  std::vector<ControlBlock*> controls_;
  std::vector<const ArenaView*> arenas_;  // the endpoint's; of remote members nullptr
  std::shared_ptr<std::byte> own_block_;
  std::unique_ptr<RemoteMembers> remote_;
  FirstFailure failure_;
};

}  // namespace dpcore
