// What a collective says about itself: when it compares its fingerprint, its name in messages and
// traces, and who keeps it waiting.
#include <vector>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/operations/collective_operation.h"
#include "comm/operations/last_calls.h"

namespace dpcore {
namespace {

// A waiting rank that has not looked up for so long is stopped (it looks every 20 ms).
constexpr int64_t kSilenceNs = 200'000'000;

}  // namespace

void CollectiveOperation::check_fingerprints(uint64_t number) const {
  for (int r = 0; r < run_.world(); ++r) {
    check_fingerprint_of(r, number);
  }
}

void CollectiveOperation::check_fingerprint_of(int r, uint64_t number) const {
  check_same_call(*group_, r, number, number != run_.number);
}

// Whoever only gives does not wait for those who take: they compare with the giver's slot before
// they read, but two ranks that both take themselves for the root would never meet. And whoever
// takes from the root alone has not looked at the others, whom it does not need. So they compare
// later: before the operation that is kSlots later at the latest, which waits for
// everybody to have finished this one, and `wherever_possible` when it has waited for everybody
// anyway. (The one that is kSlots later may be held back, and urgent ones come past it.) In between
// it compares what is known to be over, many at a time: each look at another rank's slot is a cache
// line on its way. The slots still hold the operation then: they are used again kSlotsKept
// operations later, which has to wait for this rank to finish the one that is kSlots ahead of the
// given one.
void CollectiveOperation::check_what_is_over(bool wherever_possible) const {
  std::vector<uint64_t>& unchecked = shared_->unchecked();
  size_t left = 0;
  for (const uint64_t number : unchecked) {
    bool have_all_entered = shared_->is_known_over(number) || number + kSlots == run_.number;
    if (!have_all_entered && wherever_possible) {
      have_all_entered = true;
      for (int r = 0; r < run_.world() && have_all_entered; ++r) {
        have_all_entered = has_entered(*group_, r, number);
      }
    }
    if (have_all_entered) {
      check_fingerprints(number);
    } else {
      unchecked[left++] = number;
    }
  }
  unchecked.resize(left);
}

std::string CollectiveOperation::describe() const {
  return Group::describe(run_.number, fingerprint_);
}

const char* CollectiveOperation::trace_name() const {
  return name_of(run_.request.collective).data();
}

// One that failed before its path was chosen has run nothing.
void CollectiveOperation::tell_what_ran(TraceEvent& event) const {
  if (run_.path == Path::automatic) {
    return;
  }
  event.path = name_of(run_.path, run_.request.collective);
  event.world = run_.world();
  event.root = run_.has_root() ? run_.request.root : -1;
  if (run_.path == Path::moves) {
    const std::shared_ptr<const Program>& program = run_.request.program;
    event.schedule = program->identity;
    group_->endpoint().trace().keep(program->identity, {program, &program->schedule});
  }
}

bool CollectiveOperation::needs(int r) const {
  return r == run_.unread_owner ||
         run_.slot(r).finished.load(std::memory_order_acquire) <= run_.number;
}

bool CollectiveOperation::waits_for(int r) const {
  return r != run_.me() && (!only_takes_ || r == run_.request.root);
}

int CollectiveOperation::first_late() const {
  for (int r = 0; r < run_.world(); ++r) {
    if (waits_for(r) && run_.slot(r).posted.load(std::memory_order_acquire) <= run_.number) {
      return r;
    }
  }
  // Everybody is in it. Who waits gives signs of life; who is silent keeps all others waiting,
  // along whatever chain of moves.
  int silent = -1;
  int64_t oldest = now_ns() - kSilenceNs;
  for (int r = 0; r < run_.world(); ++r) {
    const int64_t alive = group_->control(r).alive_ns.load(std::memory_order_relaxed);
    if (r != run_.me() && needs(r) && alive < oldest) {
      oldest = alive;
      silent = r;
    }
  }
  if (silent >= 0) {
    return silent;
  }
  return run_.awaited.next < run_.world() ? run_.awaited.next : -1;
}

std::string CollectiveOperation::who_is_late() const {
  std::string late;
  for (int r = 0; r < run_.world(); ++r) {
    if (waits_for(r) && run_.slot(r).posted.load(std::memory_order_acquire) <= run_.number) {
      late += (late.empty() ? "" : "; ") + ("rank " + std::to_string(r)) +
              " has not entered it: " + group_->last_operation_of(r);
    }
  }
  if (late.empty()) {
    const int peer = first_late();
    late = "every rank has entered it, but rank " + std::to_string(peer) +
           " stopped in the middle (waiting for " + run_.awaited.name + ")";
  }
  return late;
}

}  // namespace dpcore
