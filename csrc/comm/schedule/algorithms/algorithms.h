// The algorithms behind make_schedule, one function each. Internal to schedule*.cpp: everyone
// else asks make_schedule by name.
//
// A function here only says which moves there are and in which step; the registry in
// schedule.cpp adds the name and sorts. Arguments are valid when they arrive (world >= 1,
// 0 <= root < world), and a world of one needs no move.
#pragma once

#include <bit>
#include <vector>

#include "comm/schedule/schedule.h"

namespace dpcore::algorithms {

struct Plan {
  int chunks = 1;
  std::vector<Move> moves;
};

// Collectives without a root ignore the second argument.
using Algorithm = Plan (*)(int world, int root);

// The same for algorithms that care which ranks share a host: equal numbers do.
using HostAlgorithm = Plan (*)(const std::vector<int>& hosts, int root);

// direct.cpp: one step, every pair of ranks that has something to say talks at once.
Plan one_shot_all_reduce(int world, int root);
Plan direct_reduce_scatter(int world, int root);
Plan direct_all_gather(int world, int root);
Plan direct_broadcast(int world, int root);
Plan direct_reduce(int world, int root);
Plan direct_gather(int world, int root);
Plan direct_scatter(int world, int root);
Plan direct_all_to_all(int world, int root);

// two_shot.cpp: each rank owns a slice.
Plan two_shot_all_reduce(int world, int root);
Plan two_shot_reduce(int world, int root);
Plan two_shot_broadcast(int world, int root);

// ring.cpp: each rank talks to its right neighbour only.
Plan ring_all_reduce(int world, int root);
Plan ring_reduce_scatter(int world, int root);
Plan ring_all_gather(int world, int root);
Plan ring_broadcast(int world, int root);

// recursive_doubling.cpp: partners at distance 1, 2, 4, ...
Plan recursive_doubling_all_reduce(int world, int root);
Plan recursive_doubling_all_gather(int world, int root);

// halving_doubling.cpp: halve the data while reducing, double it while gathering.
Plan halving_doubling_all_reduce(int world, int root);
Plan halving_doubling_reduce_scatter(int world, int root);

// tree.cpp: a binomial tree.
Plan tree_all_reduce(int world, int root);
Plan tree_broadcast(int world, int root);
Plan tree_reduce(int world, int root);
Plan tree_gather(int world, int root);
Plan tree_scatter(int world, int root);

// bruck.cpp: rotations by 1, 2, 4, ...
Plan bruck_all_gather(int world, int root);
Plan bruck_all_to_all(int world, int root);

// hierarchical.cpp: within each host first, then between hosts.
Plan hierarchical_all_reduce(const std::vector<int>& hosts, int root);
Plan hierarchical_reduce_scatter(const std::vector<int>& hosts, int root);
Plan hierarchical_all_gather(const std::vector<int>& hosts, int root);
Plan hierarchical_broadcast(const std::vector<int>& hosts, int root);
Plan hierarchical_reduce(const std::vector<int>& hosts, int root);

// Folding makes an algorithm for powers of two work for any number of ranks. The first `core`
// ranks, the largest power of two that fits, run the algorithm; each of the `extra` others hands
// its data to its stand-in before, and takes the result from it afterwards.
struct Fold {
  explicit Fold(int world)
      : core(static_cast<int>(std::bit_floor(static_cast<unsigned>(world)))), extra(world - core) {}
  // The core rank that acts for `rank`: itself, or the stand-in of an extra one.
  int stand_in(int rank) const { return rank < core ? rank : rank - core; }

  int core;
  int extra;
};

// `value` as a rank: wraps around at both ends.
inline int wrapped(int value, int world) { return (value % world + world) % world; }

}  // namespace dpcore::algorithms
