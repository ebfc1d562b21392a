// The table of contents: which algorithms there are for which collective.
#include "comm/schedule/schedule.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "comm/base/error.h"
#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore {
namespace {

using algorithms::Algorithm;
using algorithms::HostAlgorithm;
using algorithms::Plan;

struct Entry {
  Collective collective;
  std::string_view name;
  Algorithm algorithm;
  bool adds_all_at_once;               // says nothing where there is no reduction
  HostAlgorithm over_hosts = nullptr;  // instead of `algorithm`
};

// The order is the one in which algorithms_of answers.
constexpr Entry kEntries[] = {
    {Collective::all_reduce, "one_shot", algorithms::one_shot_all_reduce, true},
    {Collective::all_reduce, "two_shot", algorithms::two_shot_all_reduce, true},
    {Collective::all_reduce, "ring", algorithms::ring_all_reduce, false},
    {Collective::all_reduce, "recursive_doubling", algorithms::recursive_doubling_all_reduce,
     false},
    {Collective::all_reduce, "halving_doubling", algorithms::halving_doubling_all_reduce, false},
    {Collective::all_reduce, "tree", algorithms::tree_all_reduce, false},
    {Collective::all_reduce, "hierarchical", nullptr, false, algorithms::hierarchical_all_reduce},
    {Collective::reduce_scatter, "direct", algorithms::direct_reduce_scatter, true},
    {Collective::reduce_scatter, "ring", algorithms::ring_reduce_scatter, false},
    {Collective::reduce_scatter, "halving_doubling", algorithms::halving_doubling_reduce_scatter,
     false},
    {Collective::reduce_scatter, "hierarchical", nullptr, false,
     algorithms::hierarchical_reduce_scatter},
    {Collective::all_gather, "direct", algorithms::direct_all_gather, true},
    {Collective::all_gather, "ring", algorithms::ring_all_gather, true},
    {Collective::all_gather, "recursive_doubling", algorithms::recursive_doubling_all_gather, true},
    {Collective::all_gather, "bruck", algorithms::bruck_all_gather, true},
    {Collective::all_gather, "hierarchical", nullptr, true, algorithms::hierarchical_all_gather},
    {Collective::broadcast, "direct", algorithms::direct_broadcast, true},
    {Collective::broadcast, "two_shot", algorithms::two_shot_broadcast, true},
    {Collective::broadcast, "ring", algorithms::ring_broadcast, true},
    {Collective::broadcast, "tree", algorithms::tree_broadcast, true},
    {Collective::broadcast, "hierarchical", nullptr, true, algorithms::hierarchical_broadcast},
    {Collective::reduce, "direct", algorithms::direct_reduce, true},
    {Collective::reduce, "two_shot", algorithms::two_shot_reduce, true},
    {Collective::reduce, "tree", algorithms::tree_reduce, false},
    {Collective::reduce, "hierarchical", nullptr, false, algorithms::hierarchical_reduce},
    {Collective::gather, "direct", algorithms::direct_gather, true},
    {Collective::gather, "tree", algorithms::tree_gather, true},
    {Collective::scatter, "direct", algorithms::direct_scatter, true},
    {Collective::scatter, "tree", algorithms::tree_scatter, true},
    {Collective::all_to_all, "direct", algorithms::direct_all_to_all, true},
    {Collective::all_to_all, "bruck", algorithms::bruck_all_to_all, true},
};

// The schedules of an all_to_all number world * world chunks with an int.
constexpr int kLargestWorld = 32768;

// Within one host, or with a host for every rank, there are no two levels: everything is added at
// once, but for a root, whose own contribution comes last.
bool has_one_level(Collective collective, const std::vector<int>& hosts) {
  const size_t count = std::set<int>(hosts.begin(), hosts.end()).size();
  return count == 1 || (count == hosts.size() && collective != Collective::reduce);
}

const Entry& find_entry(std::string_view name, Collective collective) {
  for (const Entry& entry : kEntries) {
    if (entry.collective == collective && entry.name == name) {
      return entry;
    }
  }
  std::string known;
  for (const std::string& other : algorithms_of(collective)) {
    known += known.empty() ? other : ", " + other;
  }
  if (known.empty()) {
    known = "none, it moves no data";
  }
  throw Unsupported("there is no algorithm '" + std::string(name) + "' for " +
                    std::string(name_of(collective)) + "; choose one of: " + known);
}

}  // namespace

Schedule make_schedule(std::string_view algorithm, Collective collective, int world, int root,
                       const std::vector<int>& hosts) {
  const Entry& entry = find_entry(algorithm, collective);
  if (world < 1 || world > kLargestWorld) {
    throw Unsupported("a schedule for " + std::to_string(world) +
                      " ranks: the world must have 1 to " + std::to_string(kLargestWorld));
  }
  if (root < 0 || root >= world) {
    throw Unsupported("root " + std::to_string(root) + " is not a rank of a world of " +
                      std::to_string(world) + "; choose 0 to " + std::to_string(world - 1));
  }
  if (!hosts.empty() && hosts.size() != static_cast<size_t>(world)) {
    throw Unsupported("hosts are given for " + std::to_string(hosts.size()) + " ranks of " +
                      std::to_string(world) + "; name one for every rank");
  }
  Plan plan;
  bool ordered = entry.adds_all_at_once || world <= 2;  // two can only be added at once
  if (entry.over_hosts != nullptr) {
    const std::vector<int> known = hosts.empty() ? std::vector<int>(world) : hosts;
    plan = entry.over_hosts(known, root);
    ordered = ordered || has_one_level(collective, known);
  } else {
    plan = entry.algorithm(world, root);
  }
  // Each rank sends to its right neighbour first: if all began with rank 0, the others' NICs
  // would be idle while rank 0's takes in N-1 messages. What it sends to one rank goes in the order
  // in which the algorithm names it.
  const auto sending_order = [world](const Move& move) {
    return std::tuple(move.step, move.src, (move.dst - move.src + world) % world);
  };
  std::stable_sort(plan.moves.begin(), plan.moves.end(), [&](const Move& a, const Move& b) {
    return sending_order(a) < sending_order(b);
  });
  return {.algorithm = std::string(entry.name),
          .collective = collective,
          .world = world,
          .chunks = plan.chunks,
          .root = has_root(collective) ? root : 0,
          .ordered = ordered,
          .moves = std::move(plan.moves)};
}

std::vector<std::string> algorithms_of(Collective collective) {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) {
    if (entry.collective == collective) {
      names.emplace_back(entry.name);
    }
  }
  return names;
}

}  // namespace dpcore
