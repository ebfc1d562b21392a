// What stands between a collective and its next step, and how to find out whether it still does.
#include "comm/operations/collective_operation.h"

namespace dpcore {

void CollectiveOperation::await_all(const char* name, Counter counter, uint64_t value) {
  awaited_ = {name, counter, value, 0, world(), nullptr};
}

CollectiveOperation::Until CollectiveOperation::until_all(const char* name, Counter counter,
                                                          uint64_t value) {
  await_all(name, counter, value);
  return {*this};
}

void CollectiveOperation::await_stage() {
  awaited_ = {};
  awaited_.name = "its stage to be free";
  awaited_.custom = [](CollectiveOperation& self) { return self.is_stage_free(); };
}

bool CollectiveOperation::is_slot_free() {
  if (number_ < kSlots || shared_->is_over_everywhere(number_ - kSlots)) {
    return true;
  }
  const uint64_t user = number_ - kSlots;
  // This rank counts as well: an urgent operation may have come past the earlier one.
  for (int& r = awaited_.next; r < world(); ++r) {
    if (group_->slot(r, user).finished.load(std::memory_order_acquire) <= user) {
      return false;
    }
  }
  return true;
}

// All earlier operations whose turn it was to use this stage must be over on this rank, and the
// last one that did use it on all others: the one right before may have needed no stage, and be
// over everywhere while a peer still reads what an older one left there. Those that go by messages
// never need one, so an urgent small operation need not wait for large ones between hosts.
bool CollectiveOperation::is_stage_free() {
  if (number_ < kStages || shared_->is_over_everywhere(number_ - kStages)) {
    return true;
  }
  for (uint64_t back = kStages; back < kSlots && back <= number_; back += kStages) {
    awaited_.next = me();
    const uint64_t earlier = number_ - back;
    if (group_->slot(me(), earlier).finished.load(std::memory_order_relaxed) <= earlier &&
        !shared_->needs_no_stage(earlier)) {
      return false;
    }
  }
  const uint64_t user = shared_->last_user_of_stage(number_);
  for (int r = 0; r < world(); ++r) {
    awaited_.next = r;
    if (group_->slot(r, user).finished.load(std::memory_order_acquire) <= user &&
        user != SharedState::kNobody) {
      return false;
    }
  }
  return true;
}

bool CollectiveOperation::poll() {
  if (awaited_.custom != nullptr) {
    return awaited_.custom(*this);
  }
  for (; awaited_.next < awaited_.end; ++awaited_.next) {
    if (awaited_.next == me()) {
      continue;
    }
    if ((slot(awaited_.next).*awaited_.counter).load(std::memory_order_acquire) < awaited_.value) {
      return false;
    }
  }
  return true;
}

bool CollectiveOperation::others_in_flight() const {
  return in_flight_->load(std::memory_order_relaxed) > counted;
}

}  // namespace dpcore
