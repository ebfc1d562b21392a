// send and recv: one message between two ranks, outside the sequence of collectives.
//
// Messages of one pair with one tag arrive in the order of the calls. A receive checks that
// the message has the size and dtype that it expects.
#pragma once

#include "comm/operation.h"
#include "comm/shared_state.h"

namespace dpcore {

class MessageOperation final : public Operation {
 public:
  enum class Direction { send, receive };

  void prepare(std::shared_ptr<SharedState> shared, Direction direction, int peer, uint64_t tag,
               DType dtype, std::byte* data, size_t bytes);

  Progress advance() override;
  WaitPoint waiting() const override;
  std::string describe() const override;
  const char* trace_name() const override;
  uint64_t trace_bytes() const override { return message_.total; }
  uint64_t trace_number() const override { return message_.tag.part; }
  bool needs(int r) const override { return r == peer_; }
  std::string who_is_late() const override;
  int first_late() const override { return peer_; }
  bool relieve() override { return shared_->transport().set_aside_unexpected(); }
  int64_t next_event_ns() const override { return shared_->transport().next_event_ns(); }
  void retire() override;

 private:
  bool is_its_turn();
  void end_turn();

  std::shared_ptr<SharedState> shared_;
  Direction direction_ = Direction::send;
  int peer_ = 0;
  Message message_;
  std::byte* data_ = nullptr;
  size_t done_ = 0;
  MessageLane lane_;
  bool has_turn_ = false;
  uint64_t turn_ = 0;
};

}  // namespace dpcore
