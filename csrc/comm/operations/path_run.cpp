// What stands between a collective and its next step, how to find out whether it still does, and
// what every path does at its end.
#include <algorithm>

#include "comm/network/tcp_frame.h"
#include "comm/operations/path_run.h"

namespace dpcore {

void PathRun::await_stage() {
  await("its stage to be free", [](PathRun& run) { return run.is_stage_free(); });
}

void PathRun::await_slot() {
  await("its slot to be free", [](PathRun& run) { return run.is_slot_free(); });
}

void PathRun::await_earlier() {
  await(
      "the operation that it follows", [](PathRun& run) { return run.earlier->is_complete(); }, -1);
}

bool PathRun::is_slot_free() {
  if (number < kSlots || shared->is_over_everywhere(number - kSlots)) {
    return true;
  }
  const uint64_t user = number - kSlots;
  // This rank counts as well: an urgent operation may have come past the earlier one.
  for (int& r = awaited.next; r < world(); ++r) {
    if (group->slot(r, user).finished.load(std::memory_order_acquire) <= user) {
      return false;
    }
  }
  return true;
}

// All earlier operations whose turn it was to use this stage must be over on this rank, and the
// last one that did use it on all others: the one right before may have needed no stage, and be
// over everywhere while a peer still reads what an older one left there. Those that go by messages
// never need one, so an urgent small operation need not wait for large ones between hosts.
bool PathRun::is_stage_free() {
  if (number < kStages || shared->is_over_everywhere(number - kStages)) {
    return true;
  }
  for (uint64_t back = kStages; back < kSlots && back <= number; back += kStages) {
    awaited.next = me();
    const uint64_t earlier = number - back;
    if (group->slot(me(), earlier).finished.load(std::memory_order_relaxed) <= earlier &&
        !shared->needs_no_stage(earlier)) {
      return false;
    }
  }
  const uint64_t user = shared->last_user_of_stage(number);
  for (int r = 0; r < world(); ++r) {
    awaited.next = r;
    if (group->slot(r, user).finished.load(std::memory_order_acquire) <= user &&
        user != SharedState::kNoOperation) {
      return false;
    }
  }
  return true;
}

bool PathRun::poll() {
  if (awaited.question != nullptr) {
    return awaited.question(*this);
  }
  for (; awaited.next < awaited.end; ++awaited.next) {
    if (awaited.next == me()) {
      continue;
    }
    if ((slot(awaited.next).*awaited.counter).load(std::memory_order_acquire) < awaited.value) {
      return false;
    }
  }
  return true;
}

bool PathRun::keeps_its_input(int owner) const {
  return !group->has_left(owner) &&
         group->control(owner).abort.state.load(std::memory_order_acquire) == AbortRecord::none;
}

int PathRun::owner_that_gave_up() const {
  for (int r = 0; r < world(); ++r) {
    if (r != me() && publishes(r) && !keeps_its_input(r)) {
      return r;
    }
  }
  return -1;
}

void PathRun::await_end_of(int owner) {
  unread_owner = owner;
  await_one("a rank that is gone", &OperationSlot::finished, kNoMore, owner);
}

void PathRun::learn_not_finite() {
  for (int r = 0; r < world() && request.finds_not_finite; ++r) {
    if (r != me()) {
      not_finite.merge(slot(r).not_finite);
    }
  }
}

std::byte* PathRun::take_stage() {
  std::byte* stage = shared->stage(number);
  own_slot().stage_offset = group->endpoint().arena().offset_of(stage, kStageBytes);
  return stage;
}

static_assert(std::max(kSmallBytes, kSmallBytesOfFrames) <= kMaxPostedBytes);

// What this rank wrote into its slot travels, and with it the part of its stage that the peer would
// read there: a small operation is over with one frame each way, and the code that runs it is the
// one for mapped memory. Larger data follows by the transport once all have entered.
void tell_remote_members(const PathRun& run, bool is_prefilled) {
  RemoteMembers& remote = *run.group->remote();
  const std::byte* stage = is_prefilled ? run.stage_of(run.me()) : nullptr;
  if (run.request.priority != 0) {
    remote.network().expect_priorities();
  }
  for (int r = 0; r < run.world(); ++r) {
    if (!remote.contains(r)) {
      continue;
    }
    size_t begin = 0;
    size_t bytes = 0;
    if (run.is_small && run.publishes() && run.consumes(r)) {
      begin = static_cast<size_t>(run.stage_buffer(run.me(), 0, r, run.stage_quota()) - stage);
      bytes = run.outgoing(r).elements * run.element;
    } else if (run.announces_parts) {
      bytes = static_cast<size_t>(run.world()) * sizeof(uint64_t);
    }
    remote.tell_post(r, run.own_slot(), run.request.words != nullptr, run.bytes, stage, begin,
                     bytes);
  }
}

void* PathRun::frame_memory(size_t size) {
  if (frame_bytes_ < size) {
    frame_ = std::make_unique<std::byte[]>(size);
    frame_bytes_ = size;
  }
  return frame_.get();
}

}  // namespace dpcore
