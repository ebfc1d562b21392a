// What lives for one iteration of the reducer: from the end of forward until every gradient has
// arrived once and every bucket is over. Belongs to the thread of forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpcore {

struct Iteration {
  uint64_t number = 0;     // also of those that no backward has followed
  uint64_t completed = 0;  // iterations before this one
  bool open = false;       // until the end of backward
  bool again = false;      // gradients are added to ones that are averaged already
  bool stepped = false;    // an optimizer has noted what it does with these gradients
  size_t arrived = 0;      // gradients
  size_t unfinished = 0;   // buckets whose journey is not over
  int64_t first_gradient_ns = 0;

  // Backward is over, and buckets are not.
  bool is_on_journey() const { return unfinished > 0 && !open; }
  // As messages count.
  uint64_t step() const { return completed + 1; }
};

}  // namespace dpcore
