// Partners at distance 1, 2, 4, ... exchange everything they know; what a rank knows doubles
// with every step.
//
// In step k rank r talks to rank r xor 2^k. Before it, all ranks whose numbers agree above bit k
// (a block of 2^k ranks) know the same; after it, the two blocks know what both knew. In the
// all_reduce "know" means the sum over the block, in the all_gather the block's chunks.
//
// That needs a power of two. For other worlds the extra ranks fold: rank P+i (P the largest
// power of two that fits) first hands its data to rank i, which acts for both, and takes the
// result from it at the end. See Fold.
//
// Cost per rank (S the buffer, N ranks):
//   all_reduce   log2 N steps, S log2 N
//   all_gather   log2 N steps, (N-1)/N S
//   any N        log2 P + 2 steps. all_reduce: S more each way for a rank that stands in;
//                all_gather: (N-1)/N S more out of it.
//
// Not ordered: the sums of blocks are added, not single contributions. Still all ranks get the
// same bits, because two partners combine the same two values in the same order.
//
// When it loses: large messages, since the all_reduce sends the whole buffer in every step
// (halving-doubling has the same shape with 2(N-1)/N S); worlds that are not a power of two, where
// Bruck's all-gather needs no fold. It wins for the smallest messages between hosts.
#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {

Plan recursive_doubling_all_reduce(int world, int) {
  const Fold fold(world);
  Plan plan{.chunks = 1, .moves = {}};
  int step = 0;
  for (int i = 0; i < fold.extra; ++i) {
    plan.moves.push_back({step, fold.core + i, i, 0, true});
  }
  if (fold.extra > 0) {
    ++step;
  }
  for (int distance = 1; distance < fold.core; distance *= 2, ++step) {
    for (int rank = 0; rank < fold.core; ++rank) {
      plan.moves.push_back({step, rank, rank ^ distance, 0, true});
    }
  }
  for (int i = 0; i < fold.extra; ++i) {
    plan.moves.push_back({step, i, fold.core + i, 0, false});
  }
  return plan;
}

Plan recursive_doubling_all_gather(int world, int) {
  const Fold fold(world);
  Plan plan{.chunks = world, .moves = {}};
  int step = 0;
  for (int i = 0; i < fold.extra; ++i) {
    plan.moves.push_back({step, fold.core + i, i, fold.core + i, false});
  }
  if (fold.extra > 0) {
    ++step;
  }
  for (int distance = 1; distance < fold.core; distance *= 2, ++step) {
    for (int rank = 0; rank < fold.core; ++rank) {
      for (int chunk = 0; chunk < world; ++chunk) {
        const bool in_block_of_rank = fold.stand_in(chunk) / distance == rank / distance;
        if (in_block_of_rank) {
          plan.moves.push_back({step, rank, rank ^ distance, chunk, false});
        }
      }
    }
  }
  for (int i = 0; i < fold.extra; ++i) {
    for (int chunk = 0; chunk < world; ++chunk) {
      const int dst = fold.core + i;
      if (chunk != dst) {
        plan.moves.push_back({step, i, dst, chunk, false});
      }
    }
  }
  return plan;
}

}  // namespace dpcore::algorithms
