// How long a schedule is expected to take, from a few constants of the machine and its network.
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
// order algorithms, not to predict a run. A pure function; owns nothing.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/schedule/schedule.h"

namespace dpcore {

struct WayCosts {
  double step_s = 0;     // from a send to its arrival, beyond its bytes
  double message_s = 0;  // of a rank, for each message that it sends or takes
  double byte_s = 0;
};

// Defaults for a machine that nobody has measured: mailboxes in memory, a NIC of 10 Gbit/s.
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
