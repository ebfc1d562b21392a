// A binomial tree: in every step each rank that has the data serves one more.
//
// Count positions from the root: position v is rank (root + v) mod N. The tree is read off the
// bits of v: the parent of v is v with its lowest set bit cleared. The subtree of v, when that
// bit is d, is the positions v, v+1, ..., v+d-1: one contiguous range, which is what gather and
// scatter need.
//
//   downwards (broadcast, scatter)   distance d = ..., 4, 2, 1: each v that is a multiple of 2d
//                                    serves v+d
//   upwards (reduce, gather)         the same backwards: d = 1, 2, 4, ...
//   all_reduce                       upwards to rank 0, then downwards
//
// In gather and scatter the chunks of a whole subtree travel together; inner ranks hold chunks
// for others for a while, and need room for them.
//
// Cost (S the buffer, N ranks, L = log2 N rounded up), one step after the other:
//   broadcast, reduce   L steps of S bytes: S L
//   all_reduce          2 L steps, 2 S L
//   gather, scatter     L steps, (N-1)/N S through the root, as direct
//
// Reductions are not ordered: sums of subtrees are added. All ranks get the same bits, since an
// all_reduce copies the root's.
//
// When it loses: large messages, since S passes L times over the longest path (two_shot moves
// less than 2 S, a chain about 1.25 S); and gather and scatter wherever the root can serve all
// ranks at once. It wins for small messages between many ranks, where the root of a direct plan
// would have to talk to N-1 peers by itself.
#include <algorithm>

#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {
namespace {

struct Edge {
  int parent = 0;  // positions, not ranks
  int child = 0;
  int subtree = 0;  // how many positions hang at `child`, itself included
};

// The edges of the tree, one list per step, in the order in which data flows down.
std::vector<std::vector<Edge>> edges_downwards(int world) {
  std::vector<std::vector<Edge>> steps;
  const int top = static_cast<int>(std::bit_ceil(static_cast<unsigned>(world))) / 2;
  for (int distance = top; distance >= 1; distance /= 2) {
    std::vector<Edge>& edges = steps.emplace_back();
    for (int parent = 0; parent + distance < world; parent += 2 * distance) {
      const int child = parent + distance;
      edges.push_back({parent, child, std::min(distance, world - child)});
    }
  }
  return steps;
}

// Calls visit(step, edge) for every edge.
template <typename Visit>
void for_each_edge(const std::vector<std::vector<Edge>>& steps, Visit visit) {
  for (size_t step = 0; step < steps.size(); ++step) {
    for (const Edge& edge : steps[step]) {
      visit(static_cast<int>(step), edge);
    }
  }
}

int steps_of(int world) { return static_cast<int>(edges_downwards(world).size()); }

// What flows down, backwards.
Plan upwards(Plan plan, int world, bool reduces) {
  const int last = steps_of(world) - 1;
  for (Move& move : plan.moves) {
    move = {last - move.step, move.dst, move.src, move.chunk, reduces};
  }
  return plan;
}

}  // namespace

Plan tree_broadcast(int world, int root) {
  Plan plan{.chunks = 1, .moves = {}};
  for_each_edge(edges_downwards(world), [&](int step, const Edge& edge) {
    const int src = wrapped(root + edge.parent, world);
    const int dst = wrapped(root + edge.child, world);
    plan.moves.push_back({step, src, dst, 0, false});
  });
  return plan;
}

Plan tree_reduce(int world, int root) { return upwards(tree_broadcast(world, root), world, true); }

Plan tree_all_reduce(int world, int) {
  Plan plan = tree_reduce(world, 0);
  const int upward_steps = steps_of(world);
  for (Move move : tree_broadcast(world, 0).moves) {
    move.step += upward_steps;
    plan.moves.push_back(move);
  }
  return plan;
}

Plan tree_scatter(int world, int root) {
  Plan plan{.chunks = world, .moves = {}};
  for_each_edge(edges_downwards(world), [&](int step, const Edge& edge) {
    const int src = wrapped(root + edge.parent, world);
    const int dst = wrapped(root + edge.child, world);
    for (int i = 0; i < edge.subtree; ++i) {
      plan.moves.push_back({step, src, dst, wrapped(root + edge.child + i, world), false});
    }
  });
  return plan;
}

Plan tree_gather(int world, int root) { return upwards(tree_scatter(world, root), world, false); }

}  // namespace dpcore::algorithms
