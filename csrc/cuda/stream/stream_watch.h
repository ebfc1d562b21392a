// Watches the ranks of a device communicator without waiting: their calls, and whether a rank is
// gone or late.
//
// Work on a device runs without a thread of the program waiting for it, so one thread per
// communicator checks it, every 20 ms while an operation is in flight. It notices that work is
// complete, or why it never will be: a rank died or left, a rank gave up with a reason, the library
// reported an error, or a deadline passed. The first of these fails the communicator on every rank,
// and ends the work that runs on this device.
//
// Ranks of one host compare their calls before they start: each posts a hash of its arguments under
// the number of the operation, then reads those of the others. If two ranks differ, the later one
// always sees it. No rank waits for that; a rank may be up to 32 operations ahead of those that
// compare with it.
//
// Memory: the list of works, and the black box of a group that no other operation uses. Threads:
// any may submit; the list is locked for a few instructions. A forked child has no such thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "cuda/device/device.h"

namespace dpcore {

// One operation on the device, from submission until a thread has seen that it is complete.
struct StreamWork {
  enum State : uint32_t { pending, done, failed };

  ~StreamWork();
  bool is_complete() const { return state.load(std::memory_order_acquire) != pending; }
  std::string describe() const;
  // Called once, by the thread that looks, or at once when it is complete.
  void when_complete(std::function<void()> call);

  std::shared_ptr<Device> device;
  Device::Event event = nullptr;  // happens when the device has done it
  uint32_t flag_number = 0;       // of the communicator's DoneFlag, where it has one
  bool captured = false;          // part of a graph: no thread watches it
  uint64_t number = 0;
  Fingerprint what;
  std::string message;  // of send and recv, what they are; else empty
  uint64_t traced = 0;  // its span in a trace; 0: no trace is recorded
  int64_t deadline_ns = 0;
  double timeout_s = 0;
  std::atomic<uint32_t> state{done};

 private:
  friend class StreamWatch;
  void complete(State how);

  std::mutex mutex_;
  std::vector<std::function<void()>> calls_;
};

class StreamWatch {
 public:
  struct Trouble {  // an error that came without a call; none when the text is empty
    std::string what;
    ErrorKind kind = ErrorKind::other;
    int culprit = -1;  // -1: this rank
  };
  class Watched {  // the communicator
   public:
    // Both by the thread that looks. stop() ends what runs on the device, which cannot be completed
    // any more, and returns when nothing runs there; called once.
    virtual Trouble trouble() = 0;
    virtual void stop() = 0;
    // The rank for which the device itself waits, if known; -1 otherwise.
    virtual int late_peer() const { return -1; }
    // By the thread that finds that it failed, at once, and as often: ends what waits on the device
    // as far as words in memory can. Takes no lock and calls no driver.
    virtual void let_pass() {}
    // Whether there is such a let_pass(): once a rank has failed, work may end on the device of any
    // rank without a result.
    virtual bool lets_pass() const { return false; }

   protected:
    ~Watched() = default;
  };

  // `black_box`: a communicator over the same ranks, for this watch alone.
  StreamWatch(std::shared_ptr<Communicator> black_box, std::shared_ptr<Device> device,
              Watched& watched);
  ~StreamWatch();

  Group& group() const { return black_box_->group(); }
  // Says what comes next; throws Mismatch when another rank says otherwise.
  void announce(uint64_t number, const Fingerprint& what, uint64_t bytes);
  void add(std::shared_ptr<StreamWork> work);
  // Whether the device has done what is in flight, seen or not.
  bool has_all_happened();
  // Looks now, on the thread of the caller.
  void look();
  void fail(ErrorKind kind, int culprit, const std::string& reason);
  // See Group::give_up().
  void give_up(const std::string& how);
  // Until nothing is in flight, or the deadline; then no thread looks any more.
  void close(int64_t deadline_ns);

 private:
  void run();
  bool have_results();
  void look_at_peers(const StreamWork& waiting);
  bool look_for_trouble();
  void look_at_deadlines();
  void fail_as_late(const StreamWork& late, const std::string& when);
  bool has_not_called(int r, const StreamWork& work) const;
  std::string describe_late_ranks(const StreamWork& work) const;
  void stop_once();

  std::shared_ptr<Communicator> black_box_;
  std::shared_ptr<Device> device_;
  Watched& watched_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<StreamWork>> in_flight_;  // in the order of the stream
  std::vector<std::shared_ptr<StreamWork>> completed_;  // of one look
  bool closing_ = false;
  std::atomic<bool> stopped_{false};
  std::mutex looking_;  // one thread at a time
  std::unique_ptr<std::thread> thread_;
};

}  // namespace dpcore
