// What the kernel says of a connection: how fast it carries data, and how much of it is where.
//
// The kernel measures the rate and the shortest round trip anyway; they are asked for once in a
// millisecond. Under the engine's progress lock.
#pragma once

#include <cstdint>

namespace dpcore {

struct TcpLoad {
  double bytes_per_ns = 0;   // 0: not known yet
  double round_trip_ns = 0;  // the shortest
  double on_the_way = 0;     // bytes that the other side has not confirmed
  double queued_here = 0;    // of these, unsent or in the queues of this host's NIC; if asked for
  int64_t measured_ns = 0;   // when the first two were

  void ask(int fd, bool asks_here, int64_t now);
};

}  // namespace dpcore
