// How much of a connection's data is on its way, and how much should be.
//
// TCP fills the queues of this host and of the network as far as they go. A message of another
// peer, or an urgent one, waits behind what they hold, and several senders that fill the queue of
// one receiver lose segments. So a frame does not start while more bytes are unacknowledged than
// keep the link busy: what it carries in two of its shortest round trips, and in the time until
// this rank looks again. A rank that has to share a processor may look late, so that time is
// generous. Once a message has had a priority the time is short, and longer by as much as this
// rank's looks have been late, up to its share of a segment: so a busy processor does not leave the
// link idle, and urgent data waits for no more than a segment and a frame. A frame that is more
// urgent than what is on its way starts at once.
//
// Time is an argument. Under the engine's progress lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpcore {

class TcpFlow {
 public:
  // Whether a frame of this priority may start. If not, free_ns() says when to ask again.
  // `until_next_look_ns`: one of those below.
  bool has_room(int fd, int priority, int64_t until_next_look_ns, int64_t now);
  int64_t free_ns() const { return free_ns_; }

  // This connection's shares: so many bytes the kernel may always keep that have not left, and as
  // many as `late` where looks are late.
  void share(int fd, size_t unsent, size_t late);

  static constexpr size_t kSegmentBytes = size_t{256} << 10;  // the most that urgent data waits for
  static constexpr int64_t kLateLookNs = 10'000'000;
  static constexpr int64_t kEarlyLookNs = 500'000;  // where messages have priorities

 private:
  void measure(int fd);
  void note_look(int64_t now);

  int64_t measured_ns_ = 0;
  double bytes_per_ns_ = 0;   // 0: not known yet
  double round_trip_ns_ = 0;  // the shortest
  int priority_ = 0;          // of what is on its way
  int64_t free_ns_ = 0;
  bool waits_ = false;   // a frame, for this rank to look at free_ns_
  int64_t late_ns_ = 0;  // by which looks come after that; what was long ago counts less
  double least_unsent_ = 0;
  double most_unsent_ = 0;
  double enough_ = 0;  // bytes that may be on their way, when the kernel was told last
};

}  // namespace dpcore
