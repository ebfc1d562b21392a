// One synchronous operation on the caller's thread while nothing else is in flight: what a small
// collective costs is decided here, so there is one atomic exchange on the way in, one on the
// way out, and no list in between.
#include "comm/base/error.h"
#include "comm/base/pause.h"
#include "comm/engine/engine.h"

namespace dpcore {

bool Engine::try_begin_inline() {
  if (in_flight_.load(std::memory_order_relaxed) != 0 || !has_short_way_ ||
      endpoint_->trace().recording() || !try_lock_progress()) {
    return false;
  }
  if (active_.empty()) {
    return true;
  }
  unlock_progress();
  return false;
}

bool Engine::run_inline(const std::shared_ptr<Operation>& operation, int looks) {
  ProgressLock lock(*this, ProgressLock::Taken{});
  Operation& running = *operation;
  running.begun_ns = 0;
  running.blocked_since_ns = 0;
  running.in_background = false;
  running.counted = 0;
  running.status.store(Operation::pending, std::memory_order_relaxed);
  for (int rounds = 0; rounds < looks && !is_progress_lock_wanted();) {
    const Operation::Progress progress = advance_or_fail(running);
    const bool failed = running.group().failed();
    if (failed || progress == Operation::Progress::finished) {
      running.retire();
      running.status.store(failed ? Operation::failed : Operation::done, std::memory_order_release);
      return true;
    }
    if (progress == Operation::Progress::blocked) {
      ++rounds;
      pause_between_looks();
    }
  }
  running.self = operation;
  count_in_flight(running);
  active_.push_back(operation);
  return false;
}

Operation::Progress Engine::advance_or_fail(Operation& operation) {
  try {
    return operation.advance();
  } catch (const Mismatch& problem) {
    operation.group().fail(ErrorKind::mismatch, operation.group().rank(), problem.what());
  } catch (const std::exception& problem) {
    operation.group().fail(ErrorKind::other, operation.group().rank(),
                           operation.describe() + ": " + problem.what());
  }
  return Operation::Progress::blocked;
}

// The pauses leave the processor's units to a sibling thread, which may be the very rank that we
// wait for.
void Engine::pause_between_looks() {
  constexpr int kPausesPerLook = 2;
  for (int i = 0; i < kPausesPerLook; ++i) {
    pause_briefly();
  }
}

}  // namespace dpcore
