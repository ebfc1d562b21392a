// A message of no bytes is complete at once on both sides: nothing has to travel.
#include "comm/operations/message_operation.h"

#include "comm/base/clock.h"
#include "comm/reduce/reduce.h"

namespace dpcore {
namespace {

constexpr uint64_t kUserMessage = uint64_t{1} << 63;  // tags of schedules count operations

}  // namespace

void MessageOperation::prepare(std::shared_ptr<SharedState> shared, const MessageCall& call) {
  shared_ = std::move(shared);
  group_ = shared_->group_ptr();
  sends_ = call.sends;
  peer_ = call.peer;
  message_ = {{kUserMessage, call.tag},
              call.bytes,
              static_cast<uint64_t>(call.dtype) + 1,
              true,
              peer_ == kAnyRank};
  data_ = call.data;
  done_ = 0;
  seen_changes_ = 0;
  has_places_ = false;
}

// Fragments of two messages with the same tag could not be told apart: one after the other.
void MessageOperation::take_places() {
  if (has_places_) {
    return;
  }
  has_places_ = true;
  for (int r = 0; r < group_->world(); ++r) {
    if (r == peer_ || (peer_ == kAnyRank && r != group_->rank())) {
      shared_->message_queues()[channel(r)].push_back(this);
    }
  }
}

bool MessageOperation::is_its_turn(int r) const {
  return shared_->message_queues()[channel(r)].front() == this;
}

void MessageOperation::leave_queue(int r) {
  const auto queue = shared_->message_queues().find(channel(r));
  std::erase(queue->second, this);
  if (queue->second.empty()) {
    shared_->message_queues().erase(queue);
  }
}

size_t MessageOperation::pull_from(int r) {
  auto take = [this](const std::byte* from, size_t offset, size_t bytes) {
    copy_from_peer(data_ + offset, from, bytes);
  };
  return shared_->transport().pull(r, message_, done_, Sink(take, data_));
}

// The first rank of which something has come; the queues of the others are left.
bool MessageOperation::find_peer() {
  for (int r = 0; r < group_->world() && peer_ == kAnyRank; ++r) {
    if (r != group_->rank() && is_its_turn(r) && (done_ = pull_from(r)) > 0) {
      peer_ = r;
    }
  }
  for (int r = 0; r < group_->world() && peer_ != kAnyRank; ++r) {
    if (r != group_->rank() && r != peer_) {
      leave_queue(r);
    }
  }
  return peer_ != kAnyRank;
}

Operation::Progress MessageOperation::advance() {
  if (message_.total == 0) {
    return Progress::finished;
  }
  take_places();
  if (!shared_->transport().has_changed(seen_changes_)) {
    return Progress::blocked;
  }
  const size_t before = done_;
  if (peer_ == kAnyRank) {
    if (!find_peer()) {
      return Progress::blocked;
    }
  } else if (!is_its_turn(peer_)) {
    return Progress::blocked;
  } else if (sends_) {
    done_ = shared_->transport().push(peer_, message_, data_, done_);
  } else {
    done_ = pull_from(peer_);
  }
  if (done_ == message_.total) {
    leave_queue(peer_);
    return Progress::finished;
  }
  return done_ == before ? Progress::blocked : Progress::advanced;
}

// A receive from any rank is stuck when a rank died, or when all have left.
bool MessageOperation::needs(int r) const {
  if (peer_ != kAnyRank) {
    return r == peer_;
  }
  bool all_gone = true;
  for (int other = 0; other < group_->world(); ++other) {
    all_gone &= other == group_->rank() || group_->has_left(other) || group_->is_dead(other);
  }
  return all_gone || !group_->has_left(r);
}

Operation::WaitPoint MessageOperation::waiting() const {
  return {sends_ ? "room in the mailbox" : "a message", peer_};
}

std::string MessageOperation::describe() const {
  return Group::describe_message(sends_, peer_, message_.tag.part, message_.total);
}

void MessageOperation::show_wait(int64_t now) const {
  group_->show_message(sends_, peer_, message_.tag.part, message_.total,
                       deadline_ns - to_ns(timeout_s), now);
}

const char* MessageOperation::trace_name() const { return sends_ ? "send" : "recv"; }

// A trace shows all communicators of a rank, so it calls peers by their number in the first one.
void MessageOperation::tell_what_ran(TraceEvent& event) const {
  if (peer_ != kAnyRank) {
    event.peer = group_->member(peer_);
  }
}

std::string MessageOperation::describe_late_ranks() const {
  if (peer_ == kAnyRank) {
    return "nothing with this tag came from any rank";
  }
  const std::string peer = std::to_string(peer_);
  return sends_
             ? "rank " + peer + " does not take its messages: " + group_->last_operation_of(peer_)
             : "nothing with this tag came from rank " + peer + ": " +
                   group_->last_operation_of(peer_);
}

void MessageOperation::retire() {
  if (group_->failed()) {
    shared_->transport().give_up();
  }
}

}  // namespace dpcore
