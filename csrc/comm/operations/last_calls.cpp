// Fingerprints lie in slots of control blocks; reading a peer's moves a cache line.
#include "comm/operations/last_calls.h"

#include <atomic>
#include <string>

#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr const char* kAdvice =
    "make every rank call the same operations in the same order with the same arguments";

// Only wrapped models broadcast with a layout.
bool is_of_a_model(const Fingerprint& what) {
  return what.collective == static_cast<uint8_t>(Collective::broadcast) && what.layout != 0;
}

void check_last_call(const Group& group, int r, uint64_t number) {
  const AbortRecord& record = group.control(r).abort;
  // Asked in this order: what it entered it had entered before it left.
  const bool left_well =
      group.has_left(r) && record.state.load(std::memory_order_acquire) == AbortRecord::none;
  if (has_entered(group, r, number)) {
    check_same_call(group, r, number, true);
  } else if (left_well) {
    throw Mismatch("rank " + std::to_string(r) + " finalized and left without " +
                   Group::describe(number, group.slot(group.rank(), number).fingerprint) +
                   ", which rank " + std::to_string(group.rank()) + " called; " + kAdvice);
  }
}

}  // namespace

void check_same_call(const Group& group, int r, uint64_t number, bool is_over) {
  const Fingerprint& ours = group.slot(group.rank(), number).fingerprint;
  const Fingerprint& theirs = group.slot(r, number).fingerprint;
  if (theirs == ours) {
    return;
  }
  std::string text = "the ranks disagree at operation " + std::to_string(number) + ": rank " +
                     std::to_string(group.rank()) + " called " + Group::describe(number, ours) +
                     ", rank " + std::to_string(r) + " called " + Group::describe(number, theirs);
  if (theirs.collective != ours.collective) {
    if (is_of_a_model(theirs) || is_of_a_model(ours)) {
      text +=
          "; a wrapped model broadcasts rank 0's buffers before its forward: to evaluate on one "
          "rank alone, call model.module there";
    }
  } else if (theirs.layout != ours.layout) {
    text += "; the lists of sizes (or the layout of the buckets, or the models) differ";
  }
  if (theirs.algorithm != ours.algorithm) {
    text += "; the algorithms differ (algorithm=, deterministic= or link= of the ranks)";
  }
  throw Mismatch(text +
                 (is_over ? ". This rank was done with it by then; " : ". No data was touched; ") +
                 kAdvice);
}

// The fence: of two ranks that leave at the same time, at least one sees that the other has
// entered.
void compare_last_calls(SharedState& shared) {
  Group& group = shared.group();
#if !defined(__SANITIZE_THREAD__)  // which does not know fences
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  try {
    for (const uint64_t number : shared.unchecked()) {
      for (int r = 0; r < group.world(); ++r) {
        check_last_call(group, r, number);
      }
    }
  } catch (const Mismatch& problem) {
    group.fail(ErrorKind::mismatch, group.rank(), problem.what());
  }
}

}  // namespace dpcore
