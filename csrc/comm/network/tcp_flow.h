// How much of a connection's data is on its way, and how much should be.
//
// TCP fills the queues of this host and of the network as far as they go. A message of another
// peer, or an urgent one, waits behind what they hold, and several senders that fill the queue of
// one receiver lose segments. So a frame does not start while more bytes are unacknowledged than
// keep the link busy: what it carries in two of its shortest round trips, and three times what it
// carries until this rank polls again. One part fills the queue of this host, one that of the
// network, where other senders are in between, and one covers the time in which an acknowledgement
// waits behind the data that the peer sends. A rank that has to share a processor may poll late, so
// that time is generous.
//
// Once an operation with a priority has found others in its way, two limits take the place of that
// one. What has not left this host keeps its NIC busy until this rank polls again, for half a
// millisecond, or for as long as polls have been late. And what is unacknowledged is no more than a
// segment besides the round trips: it may be in a queue elsewhere, or the receiver is late to
// confirm it. So urgent data waits for a segment and a frame at most, and a busy processor leaves
// no link idle. A frame that is more urgent than what is on its way starts at once. One of an
// operation that is overtaken only fills a gap, for instance while messages of the urgent one wait
// for their turn: it starts when hardly anything is left here, so that the gap, and not the link,
// is what it takes.
//
// A TcpFlow is pure: time and load are arguments. Under the engine's progress lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpcore {

// What the kernel says of a connection: how fast it carries data, and how much of it is where. It
// measures the rate and the shortest round trip anyway; they are asked for once in a millisecond.
struct TcpLoad {
  double bytes_per_ns = 0;   // 0: not known yet
  double round_trip_ns = 0;  // the shortest
  double on_the_way = 0;     // bytes that the other side has not confirmed
  double queued_here = 0;    // of these, unsent or in the queues of this host's NIC; if asked for
  int64_t measured_ns = 0;   // when the first two were

  void ask(int fd, bool asks_here, int64_t now);
};

// Of a frame, among the operations in flight.
enum class Precedence : uint8_t {
  none,      // no operation overtakes another
  first,     // none is more urgent than its own
  overtaken  // one is
};

class TcpFlow {
 public:
  // Whether a frame of this priority may start. If not, free_ns() says when to ask again.
  bool has_room(const TcpLoad& load, int priority, Precedence precedence, int64_t now);
  int64_t free_ns() const { return free_ns_; }
  // Whether has_room() has refused so little ago that the kernel need not be asked again.
  bool is_refused(int priority, int64_t now) const;

  // This connection's shares: so many bytes the kernel may always keep that have not left, and as
  // many as `most` where polls are late, or that are on their way.
  void share(size_t unsent, size_t most);
  // Bytes that the kernel may keep that have not left.
  size_t unsent() const { return static_cast<size_t>(unsent_); }

  static constexpr size_t kSegmentBytes = size_t{256} << 10;  // the most that urgent data waits for
  // So much before its turn an urgent message begins: a little more than what a connection's queue
  // holds at least.
  static constexpr size_t kEarlyBytes = size_t{40} << 10;

 private:
  double too_many(const TcpLoad& load, Precedence precedence);
  void record_poll(int64_t now);

  int priority_ = 0;  // of what is on its way
  int64_t free_ns_ = 0;
  int refused_ = 0;  // the priority of what was refused last
  int64_t refused_until_ns_ = 0;
  bool waits_ = false;   // a frame, for this rank to poll at free_ns_
  int64_t late_ns_ = 0;  // by which polls come after that; what was long ago counts less
  double unsent_ = 0;
  double least_unsent_ = 0;
  double most_unsent_ = 0;
};

}  // namespace dpcore
