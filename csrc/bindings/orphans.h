// Operations in flight whose handle is gone keep their buffers here, until somebody with the GIL
// sees that they are complete.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

namespace dpcore {

template <class Orphan, class IsComplete>
void let_go_of_completed(std::vector<Orphan>& orphans, IsComplete is_complete) {
  const auto done = std::stable_partition(
      orphans.begin(), orphans.end(), [&](const Orphan& orphan) { return !is_complete(orphan); });
  // They go at the end: letting go of an object may run Python code, which may call us again.
  const std::vector<Orphan> gone(std::make_move_iterator(done),
                                 std::make_move_iterator(orphans.end()));
  orphans.erase(done, orphans.end());
}

}  // namespace dpcore
