// What a schedule costs: the bytes and steps that are read off its list of moves, and how long it
// is expected to take, from a few constants of the machine and its network.
//
// Bytes have two ways: the memory of a host, and the network between hosts, where all ranks of a
// host share one NIC that sends and receives at once. A step costs the time of its way (until the
// first byte is there), the messages that its busiest rank handles, the bytes that its busiest rank
// copies and adds, and the time that its NICs need. Steps follow one another.
//
// The time of the NICs depends on the order of the moves: each NIC sends one message after the
// other, and a receiving NIC takes in one at a time. Where several ranks send to the same one at
// once (an incast), they wait for each other while the NICs of other ranks have nothing to do.
//
// What is left out: segments of one message overlap with those of others, so large transfers are a
// little faster than this; two NICs may share a switch, so they may be slower. It is there to
// order algorithms, not to predict a run. Pure functions; they own nothing.
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

struct WayCosts {
  double step_s = 0;     // from a send to its arrival, beyond its bytes
  double message_s = 0;  // of a rank, for each message that it sends or takes
  double byte_s = 0;
};

// Defaults for a machine that has not been measured: mailboxes in memory, a NIC of 10 Gbit/s.
struct CostConstants {
  WayCosts memory{3e-6, 1e-6, 0.25e-9};
  WayCosts network{30e-6, 8e-6, 0.8e-9};
  double added_byte_s = 0.1e-9;
};

// Linear in the bytes of the whole buffer, or of all ranks' parts together.
struct Estimate {
  int steps = 0;
  double fixed_s = 0;
  double per_byte_s = 0;
  double network_share = 0;  // bytes out of, or into, the busiest host, per byte of the buffer
  double seconds(size_t bytes) const { return fixed_s + per_byte_s * static_cast<double>(bytes); }
};

// `hosts[r]` is equal for ranks that share memory.
Estimate estimate(const Schedule& schedule, const std::vector<int>& hosts,
                  const CostConstants& constants);

}  // namespace dpcore
