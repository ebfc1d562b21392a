// Bruck's algorithms: rotations by 1, 2, 4, ... reach every rank in log2 N steps, whatever N is.
//
// all_gather. Before step k each rank r holds the 2^k chunks r, r+1, ..., r+2^k-1 (modulo N). It
// sends them to rank r-2^k, whose own run of chunks they continue. In the last step only as many
// as are missing travel. No fold is needed when N is not a power of two, because the ranks form a
// circle instead of pairs.
//
// all_to_all. A chunk from rank s to rank d has to advance by j = d-s (modulo N) places. It takes
// the strides that j consists of in binary: in step k every chunk whose j has bit k set moves
// 2^k ranks on. Before that step it is j mod 2^k places away from s. On the way chunks rest in
// ranks to which they do not belong, which need room for them: about half of all bytes that a
// rank holds travel in each step.
//
// Cost per rank (S the buffer, N ranks, L = log2 N rounded up):
//   all_gather   L steps, (N-1)/N S: the fewest steps and the fewest bytes
//   all_to_all   L steps, about S/2 each, S L/2 together
//
// No reduction, so ordered in the trivial sense.
//
// When it loses: the all_to_all for large messages, since every byte travels L/2 times on
// average (direct sends it once); the all_gather on mapped memory, where direct needs one step.
// It wins for small chunks between many ranks, where N-1 messages cost more than the detour.
#include <algorithm>

#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {

Plan bruck_all_gather(int world, int) {
  Plan plan{.chunks = world, .moves = {}};
  int step = 0;
  for (int held = 1; held < world; held *= 2, ++step) {
    const int sent = std::min(held, world - held);
    for (int rank = 0; rank < world; ++rank) {
      const int dst = wrapped(rank - held, world);
      for (int i = 0; i < sent; ++i) {
        plan.moves.push_back({step, rank, dst, wrapped(rank + i, world), false});
      }
    }
  }
  return plan;
}

Plan bruck_all_to_all(int world, int) {
  Plan plan{.chunks = world * world, .moves = {}};
  int step = 0;
  for (int stride = 1; stride < world; stride *= 2, ++step) {
    for (int origin = 0; origin < world; ++origin) {
      for (int advance = 0; advance < world; ++advance) {
        if ((advance & stride) == 0) {
          continue;
        }
        const int src = wrapped(origin + advance % stride, world);
        const int dst = wrapped(src + stride, world);
        const int chunk = origin * world + wrapped(origin + advance, world);
        plan.moves.push_back({step, src, dst, chunk, false});
      }
    }
  }
  return plan;
}

}  // namespace dpcore::algorithms
