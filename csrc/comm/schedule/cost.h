// What a schedule costs, read off its list of moves.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/schedule/schedule.h"

namespace dpcore {

struct Cost {
  int steps = 0;  // in which something moves
  // Per rank, over all steps.
  std::vector<size_t> sent_bytes;
  std::vector<size_t> received_bytes;
  // The larger of what the busiest rank sends and what the busiest rank receives.
  size_t max_bytes_per_rank = 0;
  // Steps follow one another, so the time is made of each step's busiest rank: the sums over the
  // steps of the most bytes that a rank moves in one direction, and of the most that it reduces.
  size_t critical_bytes = 0;
  size_t critical_reduced_bytes = 0;
};

// `count` elements are the whole buffer where the algorithm cuts it (all_reduce, broadcast,
// reduce), and one chunk where there is one chunk per rank or pair of ranks (reduce_scatter,
// all_gather, gather, scatter, all_to_all).
Cost cost_of(const Schedule& schedule, size_t count, size_t element_bytes);

// alpha: seconds per step, beta: seconds per byte sent, gamma: seconds per byte reduced. Links
// carry both directions at once, and a rank serves all its peers through one link.
double predict_seconds(const Cost& cost, double alpha, double beta, double gamma);

}  // namespace dpcore
