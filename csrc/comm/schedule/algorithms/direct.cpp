// One step: each rank hands its data to every rank that needs it, all pairs at once.
//
// There is no shorter plan, since every rank needs one step to hear of anything. What it costs
// depends on whether the same bytes have to be sent more than once. S is the whole buffer, N the
// number of ranks, and the last column is what the busiest rank moves in one direction:
//
//   all_reduce ("one_shot")       1 step, (N-1) S: every rank reads every other's whole buffer
//   reduce_scatter, all_gather    1 step, (N-1)/N S: nothing twice, this is the minimum
//   all_to_all                    1 step, (N-1)/N S: the minimum as well
//   gather, scatter               1 step, (N-1)/N S at the root: the minimum
//   broadcast, reduce             1 step, (N-1) S at the root
//
// All are ordered: a rank that reduces holds all operands at once and adds them in rank order.
//
// When it loses: one_shot and broadcast as soon as bytes cost more than a second step (two_shot
// moves 2(N-1)/N S instead); everything here where a rank cannot serve N-1 peers at once, for
// example many ranks behind one slow link (a ring loads each link once, a tree spreads the
// root's work).
#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {
namespace {

// Calls visit(src, dst) for every pair of different ranks.
template <typename Visit>
void for_each_pair(int world, Visit visit) {
  for (int src = 0; src < world; ++src) {
    for (int dst = 0; dst < world; ++dst) {
      if (src != dst) {
        visit(src, dst);
      }
    }
  }
}

// Calls visit(rank) for every rank but the root.
template <typename Visit>
void for_each_other(int world, int root, Visit visit) {
  for (int rank = 0; rank < world; ++rank) {
    if (rank != root) {
      visit(rank);
    }
  }
}

}  // namespace

Plan one_shot_all_reduce(int world, int) {
  Plan plan{.chunks = 1, .moves = {}};
  for_each_pair(world, [&](int src, int dst) { plan.moves.push_back({0, src, dst, 0, true}); });
  return plan;
}

Plan direct_reduce_scatter(int world, int) {
  Plan plan{.chunks = world, .moves = {}};
  for_each_pair(world, [&](int src, int dst) { plan.moves.push_back({0, src, dst, dst, true}); });
  return plan;
}

Plan direct_all_gather(int world, int) {
  Plan plan{.chunks = world, .moves = {}};
  for_each_pair(world, [&](int src, int dst) { plan.moves.push_back({0, src, dst, src, false}); });
  return plan;
}

Plan direct_all_to_all(int world, int) {
  Plan plan{.chunks = world * world, .moves = {}};
  for_each_pair(world, [&](int src, int dst) {
    plan.moves.push_back({0, src, dst, src * world + dst, false});
  });
  return plan;
}

Plan direct_broadcast(int world, int root) {
  Plan plan{.chunks = 1, .moves = {}};
  for_each_other(world, root, [&](int dst) { plan.moves.push_back({0, root, dst, 0, false}); });
  return plan;
}

Plan direct_reduce(int world, int root) {
  Plan plan{.chunks = 1, .moves = {}};
  for_each_other(world, root, [&](int src) { plan.moves.push_back({0, src, root, 0, true}); });
  return plan;
}

Plan direct_gather(int world, int root) {
  Plan plan{.chunks = world, .moves = {}};
  for_each_other(world, root, [&](int src) { plan.moves.push_back({0, src, root, src, false}); });
  return plan;
}

Plan direct_scatter(int world, int root) {
  Plan plan{.chunks = world, .moves = {}};
  for_each_other(world, root, [&](int dst) { plan.moves.push_back({0, root, dst, dst, false}); });
  return plan;
}

}  // namespace dpcore::algorithms
