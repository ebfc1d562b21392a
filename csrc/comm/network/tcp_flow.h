// How much of a connection's data is on its way, and how much should be.
//
// An urgent message waits for what the kernel has taken before it, in the queues of this host and
// of the network, and TCP fills these queues as far as they go. So a frame does not start while
// more bytes are unacknowledged than keep the link busy: what it carries in two of its shortest
// round trips, and in the time until this rank looks again. A frame that is more urgent than
// what is on its way starts at once.
//
// Time is an argument. Under the engine's progress lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpcore {

class TcpFlow {
 public:
  // Whether a frame of this priority may start. If not, free_ns() says when to ask again.
  bool has_room(int fd, int priority, int64_t now);
  int64_t free_ns() const { return free_ns_; }

 private:
  void measure(int fd);

  int64_t measured_ns_ = 0;
  double bytes_per_ns_ = 0;  // 0: not known yet
  size_t most_bytes_ = 0;    // to be on their way
  int priority_ = 0;         // of what is on its way
  int64_t free_ns_ = 0;
};

}  // namespace dpcore
