// A message of no bytes is complete at once on both sides: nothing has to travel.
#include "comm/message_operation.h"

#include <cstring>

namespace dpcore {
namespace {

constexpr uint64_t kUserMessage = uint64_t{1} << 63;  // tags of schedules count operations

}  // namespace

void MessageOperation::prepare(std::shared_ptr<SharedState> shared, Direction direction, int peer,
                               uint64_t tag, DType dtype, std::byte* data, size_t bytes) {
  shared_ = std::move(shared);
  group_ = shared_->group_ptr();
  direction_ = direction;
  peer_ = peer;
  message_ = {{kUserMessage, tag}, bytes, static_cast<uint64_t>(dtype) + 1, true};
  data_ = data;
  done_ = 0;
  lane_ = {direction == Direction::send, peer, tag};
  has_turn_ = false;
}

// Fragments of two messages with the same tag could not be told apart: one after the other.
bool MessageOperation::is_its_turn() {
  MessageTurns& turns = shared_->message_turns()[lane_];
  if (!has_turn_) {
    turn_ = turns.taken++;
    has_turn_ = true;
  }
  return turns.served == turn_;
}

void MessageOperation::end_turn() {
  const auto turns = shared_->message_turns().find(lane_);
  if (++turns->second.served == turns->second.taken) {
    shared_->message_turns().erase(turns);
  }
}

Operation::Progress MessageOperation::advance() {
  if (message_.total == 0) {
    return Progress::finished;
  }
  if (!is_its_turn()) {
    return Progress::blocked;
  }
  const size_t before = done_;
  if (direction_ == Direction::send) {
    done_ = shared_->transport().push(peer_, message_, data_, done_);
  } else {
    auto take = [this](const std::byte* from, size_t offset, size_t bytes) {
      std::memcpy(data_ + offset, from, bytes);
    };
    done_ = shared_->transport().pull(peer_, message_, done_, Sink(take, data_));
  }
  if (done_ == message_.total) {
    end_turn();
    return Progress::finished;
  }
  return done_ == before ? Progress::blocked : Progress::advanced;
}

Operation::WaitPoint MessageOperation::waiting() const {
  return {direction_ == Direction::send ? "room in the mailbox" : "a message", peer_};
}

std::string MessageOperation::describe() const {
  return std::string(trace_name()) + " of " + std::to_string(message_.total) + " bytes " +
         (direction_ == Direction::send ? "to" : "from") + " rank " + std::to_string(peer_) +
         " (tag " + std::to_string(message_.tag.part) + ")";
}

const char* MessageOperation::trace_name() const {
  return direction_ == Direction::send ? "send" : "recv";
}

std::string MessageOperation::who_is_late() const {
  const std::string peer = std::to_string(peer_);
  return direction_ == Direction::send
             ? "rank " + peer + " does not take its messages: " + group_->last_operation_of(peer_)
             : "nothing with this tag came from rank " + peer + ": " +
                   group_->last_operation_of(peer_);
}

void MessageOperation::retire() {
  if (group_->failed()) {
    shared_->transport().give_up();
  }
  data_ = nullptr;
}

}  // namespace dpcore
