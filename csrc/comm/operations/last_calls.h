// Whether ranks called the same as operation n. An operation asks while it runs; what was over here
// before the others had entered it is compared by a later one, or else when this rank leaves.
#pragma once

#include <cstdint>

#include "comm/operations/shared_state.h"

namespace dpcore {

inline bool has_entered(const Group& group, int r, uint64_t number) {
  return group.slot(r, number).posted.load(std::memory_order_acquire) > number;
}

// Throws Mismatch where rank r, which has entered the operation, called something else than this
// rank. `is_over`: on this rank.
void check_same_call(const Group& group, int r, uint64_t number, bool is_over);

// Compares what no later operation has compared, with the ranks that have entered it by now. One
// that enters it later finds this rank's call when it leaves itself. To be called when nothing is
// in flight; the group fails where they differ.
void compare_last_calls(SharedState& shared);

}  // namespace dpcore
