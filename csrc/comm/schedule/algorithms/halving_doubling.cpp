// Rabenseifner's all-reduce: reduce-scatter by recursive halving, all-gather by recursive
// doubling. As few bytes as a ring, as few steps as a tree, twice over.
//
// Halving: every rank begins with all chunks in its charge. Partners at distance P/2 split their
// common charge: each sends the other the half in which the other's own chunk lies, and the
// receiver adds. Then the same at distance P/4, down to 1, with half the bytes each time, until
// every rank is in charge of its own chunk only, which is now complete. Doubling runs the film
// backwards, with copies: distance 1, 2, ..., P/2.
//
// The charge of a rank between the steps is an aligned block of chunks: before the exchange at
// distance d those chunks c with c/(2d) == rank/(2d), afterwards those with c/d == rank/d.
//
// That needs a power of two. For other worlds the extra ranks fold: rank P+i (P the largest
// power of two that fits) first hands its whole buffer to rank i and takes the result from it at
// the end. See Fold. In a reduce_scatter, a stand-in is in charge of two chunks.
//
// Cost per rank (S the buffer, N ranks):
//   all_reduce       2 log2 N steps, 2(N-1)/N S
//   reduce_scatter   log2 N steps, (N-1)/N S
//   any N            two steps more; S more into a stand-in, and S (all_reduce) or S/N
//                    (reduce_scatter) more out of it
//
// Not ordered: sums over blocks of ranks are added. Each chunk is completed by one rank and
// copied from there, so all ranks get the same bits.
//
// When it loses: worlds that are not a power of two (folding about doubles the bytes: prefer a
// ring), and mapped memory, where two_shot moves the same bytes in two steps. It wins for middle
// to large messages between hosts in worlds that are a power of two. The all-gather half alone
// is recursive_doubling's all_gather.
#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {
namespace {

// The reduce-scatter: afterwards core rank c % core holds the sum of chunk c. Returns the step
// that comes next.
int append_halving(Plan& plan, const Fold& fold) {
  int step = 0;
  for (int i = 0; i < fold.extra; ++i) {
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      plan.moves.push_back({step, fold.core + i, i, chunk, true});
    }
  }
  if (fold.extra > 0) {
    ++step;
  }
  for (int distance = fold.core / 2; distance >= 1; distance /= 2, ++step) {
    for (int rank = 0; rank < fold.core; ++rank) {
      const int partner = rank ^ distance;
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        const bool in_half_of_partner = fold.stand_in(chunk) / distance == partner / distance;
        if (in_half_of_partner) {
          plan.moves.push_back({step, rank, partner, chunk, true});
        }
      }
    }
  }
  return step;
}

}  // namespace

Plan halving_doubling_all_reduce(int world, int) {
  const Fold fold(world);
  Plan plan{.chunks = fold.core, .moves = {}};
  int step = append_halving(plan, fold);
  for (int distance = 1; distance < fold.core; distance *= 2, ++step) {
    for (int rank = 0; rank < fold.core; ++rank) {
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        const bool in_block_of_rank = chunk / distance == rank / distance;
        if (in_block_of_rank) {
          plan.moves.push_back({step, rank, rank ^ distance, chunk, false});
        }
      }
    }
  }
  for (int i = 0; i < fold.extra; ++i) {
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      plan.moves.push_back({step, i, fold.core + i, chunk, false});
    }
  }
  return plan;
}

Plan halving_doubling_reduce_scatter(int world, int) {
  const Fold fold(world);
  Plan plan{.chunks = world, .moves = {}};
  const int step = append_halving(plan, fold);
  for (int i = 0; i < fold.extra; ++i) {
    plan.moves.push_back({step, i, fold.core + i, fold.core + i, false});
  }
  return plan;
}

}  // namespace dpcore::algorithms
