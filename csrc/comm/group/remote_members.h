// The members of a group that share no memory with this rank, as if they did.
//
// For each of them this rank keeps a *mirror*: a control block and stages like those in the
// member's own arena, filled from the control frames that the member sends. Code that compares
// fingerprints, waits for a counter, adopts a failure or tells which rank is late reads a mirror as
// it reads a mapped arena, and need not know the difference. The other way round, what this rank
// writes into its own control block is sent to these members by the calls below. The mirrors lie in
// a memfd, like an arena, so that `dpcore inspect` finds in one process what is known of all.
//
// Threads: mirrors are written by take(), under the engine's progress lock (and the network's lock
// on its targets); their atomics are read by any thread. The tell_ functions may be called by any
// thread. A post fills the slot of an operation kSlotsKept later only after all have finished the
// earlier one, which is the sender's side of the same rule, so a mirror is never overwritten while
// it is read.
#pragma once

#include <memory>
#include <vector>

#include "comm/network/network.h"

namespace dpcore {

class RemoteMembers final : public Network::Target {
 public:
  // `members[r]` is the endpoint rank of rank r; `remote[r]` whether it is reached by TCP.
  RemoteMembers(Network& network, uint64_t job, uint64_t group, const std::vector<int>& members,
                std::vector<bool> remote, int rank);
  ~RemoteMembers() override;
  RemoteMembers(const RemoteMembers&) = delete;
  RemoteMembers& operator=(const RemoteMembers&) = delete;

  Network& network() const { return network_; }
  uint64_t group() const { return group_; }
  bool contains(int r) const { return mirrors_[r] != nullptr; }
  // What stands for the base of r's arena: the control block lies at its start.
  std::byte* base(int r) const { return mirrors_[r]; }
  int peer_of(int r) const { return members_[r]; }

  // What this rank has just written into `slot`; `bytes` of user data, and a part of its stage.
  void tell_post(int r, const OperationSlot& slot, bool has_word, uint64_t bytes,
                 const std::byte* stage, size_t stage_offset, size_t stage_bytes);
  void tell_finished(uint64_t number);
  void tell_failure(const AbortRecord& record);
  // With why, where the record says so.
  void tell_left(const AbortRecord& record);
  // With the message that this rank waits for, if it was seen to at `now`.
  void tell_alive(const MessageWait& message, int64_t now);
  // Where this rank's program is. Peers that have not taken what was sent before are left out.
  void tell_placement(const Placement& placement, int64_t now);
  void tell_ballot(const Ballot& ballot);
  // Of user data, sent with posts so far.
  uint64_t posted_bytes() const { return posted_bytes_.load(std::memory_order_relaxed); }
  void flush(int r) { network_.flush(members_[r]); }
  void flush_all();

  void take(int peer, const FrameHeader& frame, const std::byte* payload) override;
  bool wants_data() const override { return !given_up_.load(std::memory_order_acquire); }
  void give_up() { given_up_.store(true, std::memory_order_release); }

 private:
  // All mirrors behind each other, after a header.
  class Memory {
   public:
    explicit Memory(size_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::byte* base() const { return base_; }

   private:
    Descriptor fd_;
    size_t bytes_;
    std::byte* base_ = nullptr;
  };

  static size_t stages_offset(int world);
  ControlBlock& control(int r) const { return *reinterpret_cast<ControlBlock*>(base(r)); }
  void take_post(int r, const FrameHeader& frame, const std::byte* payload);
  void take_abort(int r, AbortRecord::State state, const std::byte* payload);
  void take_message_wait(int r, const std::byte* payload);
  void take_placement(int r, const std::byte* payload);
  template <class F>
  void for_each(F&& call) const;
  FrameHeader frame_of(FrameKind kind, uint64_t operation = 0) const;
  void send_to_all(const FrameHeader& frame, const void* body = nullptr, size_t body_bytes = 0);

  Network& network_;
  uint64_t group_;
  std::vector<int> members_;
  std::vector<int> rank_of_;  // by endpoint rank
  std::unique_ptr<Memory> memory_;
  std::vector<std::byte*> mirrors_;
  std::atomic<bool> given_up_{false};
  std::atomic<uint64_t> posted_bytes_{0};
};

}  // namespace dpcore
