// All TCP connections of one rank, and how its threads sleep on them.
//
// Per peer: one connection for control frames (tcp_frame.h) and some for data (tcp_line.h). The
// network moves bytes and knows no operation: control frames go to the *target* registered for
// their group, data frames wait in their connections until an operation pulls them.
//
// Threads. poll(), read_control() and the data lines: under the engine's progress lock. Queues of
// control frames: any thread (a failure is told by the one that finds it), under a spin lock per
// peer that is held for a copy or one non-blocking send. sleep() and wake(): any thread; a sleeper
// only waits on the epoll descriptor, so it never takes an event away from the holder of the lock,
// which never takes the token away by which a sleeper is woken.
//
// A peer is lost when its control connection ends: what it had sent before, control and data, is
// still read. Memory: a queue holds what its peer has not taken yet, which the slots of
// operations bound. What is set aside while no operation is in flight is bounded by kMaxAsideBytes
// per peer, after which the peer is left waiting (back-pressure). An operation that waits takes in
// whatever lies before its data: what bounds that is what the peer's program has sent.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/fork_guard.h"
#include "comm/base/spin_lock.h"
#include "comm/network/changes.h"
#include "comm/network/message.h"
#include "comm/network/tcp_frame.h"
#include "comm/network/tcp_line.h"
#include "comm/network/tcp_socket.h"

namespace dpcore {

class Network {
 public:
  class Target {
   public:
    virtual ~Target() = default;
    // A control frame of the group from a peer, in the order it was sent. Under the progress lock.
    virtual void take(int peer, const FrameHeader& frame, const std::byte* payload) = 0;
    // Whether data frames of the group may still be asked for.
    virtual bool wants_data() const = 0;
  };
  // A frame that came before an operation asked for it.
  struct Fragment {
    size_t total;
    uint64_t content;
    size_t offset;
    std::vector<std::byte> bytes;
  };
  using Aside = std::map<std::pair<uint64_t, MessageTag>, std::vector<Fragment>>;

  // `wake_event`, from make_wake_event(), is what sleep() listens to besides the connections; the
  // ranks of this host have copies of it. Peers on the same host have no connection and are
  // not handled here.
  Network(int rank, std::vector<TcpPeer> peers, Descriptor wake_event);
  static Descriptor make_wake_event();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  void add_group(uint64_t group, Target* target);
  // After it returns the target is called no more.
  void remove_group(uint64_t group);

  // Appends a frame of header, body and data to the queue; flush() sends it.
  void queue(int peer, FrameHeader header, const void* body = nullptr, size_t body_bytes = 0,
             const std::byte* data = nullptr, size_t data_bytes = 0);
  void flush(int peer);
  // Whether everything queued for the peer has left (then one more sign of life does no harm).
  bool has_room(int peer) const;

  // Takes in what epoll has to say and all control frames that came.
  void poll();
  // Until something happens on a connection, wake() is called, or the time is over.
  void sleep(int64_t nanoseconds);
  // So many sleepers; a token that comes too late wakes the next one.
  void wake(uint32_t sleepers) { wake(wake_event_.get(), sleepers); }
  static void wake(int wake_event, uint32_t sleepers);

  // A peer one of whose data connections broke is lost as well, once it has been heard out.
  void look_for_broken_lines();
  bool is_lost(int peer) const { return peers_[peer]->lost.load(std::memory_order_acquire); }
  // Whether the kernel of its host ended the connection: then its process is gone, or has closed
  // it. Otherwise it may live, out of reach. To be asked only of a peer that is lost, as the next.
  bool was_closed_there(int peer) const { return peers_[peer]->closed_there; }
  // Why; to be asked only of a peer that is lost.
  const std::string& problem_of(int peer) const { return peers_[peer]->problem; }
  const std::string& address_of(int peer) const { return peers_[peer]->address; }

  std::vector<TcpLine>& data_lines(int peer) { return peers_[peer]->data; }
  // The longest frame of data that leaves this rank, and how much of a connection's data the kernel
  // keeps before it has left: an urgent frame has to wait for both.
  size_t frame_bytes() const { return frame_bytes_; }
  // A collective that moves data, of whatever group, for as long as this lives. Under the lock.
  class Moving {
   public:
    Moving(Network* network, int priority);
    ~Moving();
    Moving(const Moving&) = delete;
    Moving& operator=(const Moving&) = delete;

   private:
    Network* network_;
    int priority_;
  };
  // An operation with a priority begins. From the first one on that finds others in its way,
  // connections are handed no more than keeps them busy until this rank polls again (tcp_flow.h).
  void expect_priorities() { has_priorities_ = has_priorities_ || !moving_.empty(); }
  Precedence precedence_of(int priority) const;
  // Whether collectives in flight are less urgent, and none is more urgent.
  bool overtakes(int priority) const;
  Changes& changes() { return changes_; }
  // A message found no connection to the peer that could take a frame of it: no message after it
  // starts one for now; frames that have begun go on.
  void want_line(int peer) { peers_[peer]->claim = changes_.claim(); }
  bool is_line_wanted(int peer) { return changes_.holds(peers_[peer]->claim); }
  // Gives the sink what was set aside of a message; `have` and the result count its bytes.
  // `named` is the peer's rank in the group, for messages.
  size_t take_aside(int peer, int named, uint64_t group, const Message& message, size_t have,
                    const Sink& sink);
  std::byte* scratch() { return scratch_.get(); }
  // Takes data frames that no operation has asked for out of the way; those of closed or failed
  // groups are thrown away. `is_needed`: an operation waits for what may lie behind them, so
  // kMaxAsideBytes does not count. True when anything moved.
  bool set_aside_unexpected(bool is_needed);

  // Called between two polls of the functions below: what has come is to be taken in, for peers
  // that wait like this rank and hold what it has sent until then.
  using TakeIn = std::function<void()>;
  // Waits until the peer's kernel has the data that was sent before the call, as long as
  // `is_wanted`: then this rank may say that it leaves, which goes another way and is believed at
  // once.
  void deliver_data(int peer, int64_t deadline_ns, const std::function<bool()>& is_wanted,
                    const TakeIn& take_in);
  // Waits until the peers' kernels have all that was sent: then this process may end.
  void settle(int64_t deadline_ns, const TakeIn& take_in);

  // Operations may wait so long: until then a connection is not given up, whatever happens to the
  // network. Any thread; the longest that was ever asked for counts.
  void set_timeout(int64_t nanoseconds) {
    if (nanoseconds > timeout_ns_.load(std::memory_order_relaxed)) [[unlikely]] {
      set_longer_timeout(nanoseconds);
    }
  }

  static constexpr size_t kMaxAsideBytes = size_t{256} << 20;
  // At least, since a peer may allow itself more time than this rank, and one that does not take
  // what was sent to it (its program computes) counts as silent too, as soon as its memory is full.
  static constexpr int64_t kLeastTimeoutNs = int64_t{900} * 1'000'000'000;

 private:
  struct Peer {
    explicit Peer(TcpSocket control_socket) : control(std::move(control_socket)) {}
    TcpSocket control;
    std::vector<TcpLine> data;
    std::string address;
    SpinLock lock;               // of the queue
    std::vector<std::byte> out;  // control frames
    size_t out_sent = 0;         // of these
    std::vector<std::byte> in;   // of the control connection: room for the longest frame
    size_t in_bytes = 0;
    bool readable = true;
    std::atomic<bool> lost{false};
    std::string problem;        // set before lost
    bool closed_there = false;  // the same
    Changes::Claim claim;       // of a message to a connection
    Aside aside;
    size_t aside_bytes = 0;
  };

  void watch(int fd, uint64_t name);
  void read_control(int peer, bool ends);
  bool parse_control(int peer);
  void lose(int peer, const std::string& problem);
  void send_queued(Peer& peer);
  bool set_aside(int peer, TcpLine& line, bool is_needed);
  bool is_wanted(uint64_t group);
  void forget_closed_groups();
  void set_longer_timeout(int64_t nanoseconds);

  void share_card();

  int rank_;
  size_t frame_bytes_ = 0;
  Changes changes_;
  std::vector<int> moving_;  // priorities of the collectives that move data
  bool has_priorities_ = false;
  std::atomic<int64_t> timeout_ns_{0};
  SpinLock timeout_lock_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; none for those without connections
  Descriptor epoll_;
  Descriptor wake_event_;
  fork_guard::Origin origin_;
  SpinLock groups_lock_;
  std::vector<std::pair<uint64_t, Target*>> groups_;
  std::atomic<bool> groups_closed_{false};  // and what was set aside for them is of no use
  std::unique_ptr<std::byte[]> scratch_;
};

}  // namespace dpcore
