// The ranks stand in a circle and each talks to its right neighbour only.
//
// The buffer is cut in one chunk per rank. In the reduce-scatter half, a chunk starts right of
// its owner and travels once around: every rank on the way adds its own contribution and passes
// the partial sum on, so that it is complete when it reaches its owner. In the all-gather half
// the complete chunks travel around once more and are copied instead of added. At any moment
// each rank sends one chunk and receives another, so all links are busy all the time.
//
//   step s of reduce_scatter   rank r sends chunk r-1-s to r+1, which adds
//   step s of all_gather       rank r sends chunk r-s   to r+1, which copies
//
// The ring broadcast is a chain: the root cuts the buffer in small chunks and sends one per
// step, and every rank forwards what came in the step before. The chain is a pipeline, which
// needs N-2 steps to fill; with kBroadcastChunksPerRank chunks for each rank, filling it costs
// about a quarter of the time in which the data passes.
//
// Cost per rank (S the buffer, N ranks, K the chunks of the broadcast):
//   all_reduce                  2(N-1) steps, 2(N-1)/N S: the fewest bytes there can be
//   reduce_scatter, all_gather  N-1 steps, (N-1)/N S
//   broadcast                   K+N-2 steps of S/K bytes: S (1 + (N-2)/K) one after the other
//
// Not ordered: the contributions to chunk c are added beginning with rank c+1. All ranks get the
// same bits, but other bits when the buffer is cut otherwise.
//
// When it loses: small messages, where 2(N-1) latencies are all that counts (two_shot needs 2,
// recursive doubling log N); and wherever all pairs can talk at once, since two_shot moves the
// same bytes in two steps. It wins when each rank has one link to each side, or one slow port.
#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {
namespace {

constexpr int kBroadcastChunksPerRank = 4;

void append_all_gather(std::vector<Move>& moves, int first_step, int world) {
  for (int step = 0; step < world - 1; ++step) {
    for (int rank = 0; rank < world; ++rank) {
      const int right = wrapped(rank + 1, world);
      moves.push_back({first_step + step, rank, right, wrapped(rank - step, world), false});
    }
  }
}

}  // namespace

Plan ring_reduce_scatter(int world, int) {
  Plan plan{.chunks = world, .moves = {}};
  for (int step = 0; step < world - 1; ++step) {
    for (int rank = 0; rank < world; ++rank) {
      const int right = wrapped(rank + 1, world);
      plan.moves.push_back({step, rank, right, wrapped(rank - 1 - step, world), true});
    }
  }
  return plan;
}

Plan ring_all_gather(int world, int) {
  Plan plan{.chunks = world, .moves = {}};
  append_all_gather(plan.moves, 0, world);
  return plan;
}

Plan ring_all_reduce(int world, int root) {
  Plan plan = ring_reduce_scatter(world, root);
  append_all_gather(plan.moves, world - 1, world);
  return plan;
}

Plan ring_broadcast(int world, int root) {
  Plan plan{.chunks = kBroadcastChunksPerRank * world, .moves = {}};
  for (int link = 0; link < world - 1; ++link) {
    const int src = wrapped(root + link, world);
    const int dst = wrapped(root + link + 1, world);
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      plan.moves.push_back({link + chunk, src, dst, chunk, false});
    }
  }
  return plan;
}

}  // namespace dpcore::algorithms
