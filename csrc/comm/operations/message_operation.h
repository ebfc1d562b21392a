// send and recv: one message between two ranks, outside the sequence of collectives.
//
// Messages of one pair with one tag arrive in the order of the calls. A receive checks that
// the message has the size and dtype that it expects. A receive from any rank stands in the
// queues of all ranks, and takes the first message with its tag that it finds.
#pragma once

#include "comm/engine/operation.h"
#include "comm/operations/shared_state.h"

namespace dpcore {

// What a caller asks for; the buffer stays the caller's until the operation is over.
struct MessageCall {
  bool sends = true;  // or receives
  int peer = 0;       // of a receive, MessageOperation::kAnyRank too
  uint64_t tag = 0;
  DType dtype = DType::u8;
  std::byte* data = nullptr;
  size_t bytes = 0;
  double timeout_s = 0;  // 0: the communicator's
};

inline MemoryUse memory_use(bool sends, const std::byte* data, size_t bytes) {
  return sends ? MemoryUse{data, bytes, nullptr, 0} : MemoryUse{nullptr, 0, data, bytes};
}

class MessageOperation final : public Operation {
 public:
  static constexpr int kAnyRank = -1;

  void prepare(std::shared_ptr<SharedState> shared, const MessageCall& call);

  Progress advance() override;
  WaitPoint waiting() const override;
  std::string describe() const override;
  MemoryUse memory_use() const override {
    return dpcore::memory_use(sends_, data_, message_.total);
  }
  const char* trace_name() const override;
  uint64_t trace_bytes() const override { return message_.total; }
  uint64_t trace_number() const override { return message_.tag.part; }
  void tell_what_ran(TraceEvent& event) const override;
  bool needs(int r) const override;
  std::string describe_late_ranks() const override;
  int first_late() const override { return peer_; }
  void show_wait(int64_t now) const override;
  bool relieve() override { return shared_->transport().set_aside_unexpected(); }
  int64_t next_event_ns() const override { return shared_->transport().next_event_ns(); }
  bool is_held_back(int r) override { return shared_->transport().is_held_back(r); }
  void retire() override;

  // The other rank; kAnyRank while a receive from any has not found one.
  int peer() const { return peer_; }

 private:
  MessageChannel channel(int r) const { return {sends_, r, message_.tag.part}; }
  void take_places();
  bool is_its_turn(int r) const;
  void leave_queue(int r);
  bool find_peer();
  size_t pull_from(int r);

  std::shared_ptr<SharedState> shared_;
  bool sends_ = true;
  int peer_ = 0;
  Message message_;
  std::byte* data_ = nullptr;
  size_t done_ = 0;
  uint64_t seen_changes_ = 0;  // of the transport
  bool has_places_ = false;
};

}  // namespace dpcore
