// What a collective says about itself: the comparison of fingerprints, its name in messages and
// traces, and who keeps it waiting.
#include <vector>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/operations/collective_operation.h"

namespace dpcore {

void CollectiveOperation::check_fingerprints(uint64_t number) const {
  const Fingerprint& ours = group_->slot(me(), number).fingerprint;
  for (int r = 0; r < world(); ++r) {
    const Fingerprint& theirs = group_->slot(r, number).fingerprint;
    if (theirs == ours) {
      continue;
    }
    std::string text = "the ranks disagree at operation " + std::to_string(number) + ": rank " +
                       std::to_string(me()) + " called " + Group::describe(number, ours) +
                       ", rank " + std::to_string(r) + " called " + Group::describe(number, theirs);
    if (theirs.layout != ours.layout) {
      text += "; the lists of sizes (or the layout of the buckets, or the models) differ";
    }
    if (theirs.algorithm != ours.algorithm) {
      text += "; the algorithms differ";
    }
    throw Mismatch(text +
                   ". No data was touched; make every rank call the same operations in "
                   "the same order with the same arguments");
  }
}

// Whoever only gives does not wait for those who take: they compare with the giver's slot before
// they read, but two ranks that both take themselves for the root would never meet. So a giver
// compares later: before the operation that is kSlots later at the latest, which waits for
// everybody to have finished this one, and `wherever_possible` when it has waited for everybody
// anyway. (The one that is kSlots later may be held back, and urgent ones come past it.) In between
// it compares what is known to be over, many at a time: each look at another rank's slot is a cache
// line on its way. The slots still hold the operation then: they are used again kSlotsKept
// operations later, which has to wait for this rank to finish the one that is kSlots ahead of the
// given one.
void CollectiveOperation::check_what_was_given(bool wherever_possible) const {
  std::vector<uint64_t>& unchecked = shared_->unchecked();
  size_t left = 0;
  for (const uint64_t number : unchecked) {
    bool have_all_entered = shared_->is_known_over(number) || number + kSlots == number_;
    if (!have_all_entered && wherever_possible) {
      have_all_entered = true;
      for (int r = 0; r < world() && have_all_entered; ++r) {
        have_all_entered = group_->slot(r, number).posted.load(std::memory_order_acquire) > number;
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

std::string CollectiveOperation::describe() const { return Group::describe(number_, fingerprint_); }

const char* CollectiveOperation::trace_name() const { return name_of(request_.collective).data(); }

// One that failed before its path was chosen has run nothing.
void CollectiveOperation::tell_what_ran(TraceEvent& event) const {
  if (path_ == Path::automatic) {
    return;
  }
  event.path = name_of(path_, request_.collective);
  event.world = world();
  event.root = has_root() ? request_.root : -1;
  if (path_ == Path::moves) {
    const std::shared_ptr<const Program>& program = request_.program;
    event.schedule = program->identity;
    group_->endpoint().trace().keep(program->identity, {program, &program->schedule});
  }
}

bool CollectiveOperation::needs(int r) const {
  return r == unread_owner_ || slot(r).finished.load(std::memory_order_acquire) <= number_;
}

int CollectiveOperation::first_late() const {
  for (int r = 0; r < world(); ++r) {
    if (r != me() && slot(r).posted.load(std::memory_order_acquire) <= number_) {
      return r;
    }
  }
  // Everybody is in it. Who waits gives signs of life; who is silent keeps all others waiting,
  // along whatever chain of moves.
  int silent = -1;
  int64_t oldest = now_ns() - kSilenceNs;
  for (int r = 0; r < world(); ++r) {
    const int64_t alive = group_->control(r).alive_ns.load(std::memory_order_relaxed);
    if (r != me() && needs(r) && alive < oldest) {
      oldest = alive;
      silent = r;
    }
  }
  if (silent >= 0) {
    return silent;
  }
  return awaited_.next < world() ? awaited_.next : -1;
}

std::string CollectiveOperation::who_is_late() const {
  std::string late;
  for (int r = 0; r < world(); ++r) {
    if (r != me() && slot(r).posted.load(std::memory_order_acquire) <= number_) {
      late += (late.empty() ? "" : "; ") + ("rank " + std::to_string(r)) +
              " has not entered it: " + group_->last_operation_of(r);
    }
  }
  if (late.empty()) {
    const int peer = first_late();
    late = "every rank has entered it, but rank " + std::to_string(peer) +
           " stopped in the middle (waiting for " + awaited_.name + ")";
  }
  return late;
}

}  // namespace dpcore
