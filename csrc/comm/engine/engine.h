// Which thread executes operations: the thread that waits for one, or else the progress thread.
//
// One engine per endpoint. Operations are submitted by any thread through a lock-free stack;
// the *progress lock* (an atomic flag) says which one thread may advance them. wait() takes it and
// drives everything in flight until its operation is complete, so a small synchronous operation
// runs on the caller's thread without a hop. Asynchronous operations are driven by the progress
// thread, which is started by the first of them, never spins, and gives the lock up between two
// segments as soon as a thread waits.
//
// Sleeping: all threads of the endpoint sleep on its doorbell (rung by peers, by submissions
// and by completions); the progress thread without anything to do sleeps on a word of its own.
// No thread holds the progress lock while it sleeps. A sleeper checks deadlines, the death of
// peers and signals every kSliceNs. Before they sleep, threads poll for a while, or yield
// where ranks outnumber processors.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/engine/operation.h"

namespace dpcore {

// Of the operations in which this process waits, the one that was called first. All engines of the
// process record it whenever they look for trouble, every 20 ms. Any thread may ask.
struct LongWait {
  int64_t called_ns = 0;  // 0: no operation was incomplete when they last looked
  double timeout_s = 0;
};
LongWait longest_wait(int64_t now_ns);

class ScopedCount {  // counts a scope in an atomic
 public:
  explicit ScopedCount(std::atomic<uint32_t>& counter) : counter_(counter) {
    counter_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~ScopedCount() { counter_.fetch_sub(1, std::memory_order_seq_cst); }
  ScopedCount(const ScopedCount&) = delete;
  ScopedCount& operator=(const ScopedCount&) = delete;

 private:
  std::atomic<uint32_t>& counter_;
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Endpoint> endpoint);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // How often a waiting caller polls before it sleeps, with a processor for every rank: longer
  // than a small operation, shorter than a time slice. (Over TCP it polls fewer times.)
  static constexpr int kPollsBeforeSleep = 1500;

  // Called now and then while a thread waits; throws to give up (Ctrl-C).
  using Interrupt = std::function<void()>;

  // On a slow link a thread that waits is to leave its processor to others at once.
  void sleep_early() {
    polls_ = polls_again_ = 1;
    has_short_way_ = false;
  }

  // There is a progress thread from here on; throws an Error where it can't be started.
  void be_ready_for_background();
  // Hands over an operation. `background`: it may be that no thread ever waits for it, so the
  // progress thread has to drive it, which was made ready before. Throws nothing: the operation has
  // its number, which the other ranks wait for.
  void submit(std::shared_ptr<Operation> operation, bool background);
  // The short way for a synchronous operation while nothing else is in flight: without a list, a
  // queue or a count. try_begin_inline() takes the progress lock, or says that this is not the
  // moment; run_inline() gives it back. Done or failed: the operation is complete, and the pool's
  // again. Pending: it is in flight, as after submit(), and `pending` holds it, since it did not
  // come to an end within so many polls, or others want the lock.
  bool try_begin_inline();
  Operation::Status run_inline(Operation& running, int polls, std::shared_ptr<Operation>& pending);
  // Returns true when the operation is complete (also when it failed), false at the deadline.
  bool wait(Operation& operation, int64_t deadline_ns, const Interrupt& interrupt);
  // Until nothing of the group is in flight any more, or the deadline is over.
  void drain(const Group& group, int64_t deadline_ns, const Interrupt& interrupted = {});
  // Over TCP: takes in what has come that was not asked for yet, unless a thread holds the progress
  // lock, which does so itself.
  void take_in_unexpected();
  // The same, but leaves data where it is.
  void take_in_control();

  // Whether a thread is within wait() or run_inline().
  bool has_waiter() const {
    return waiters_.load(std::memory_order_relaxed) > 0 ||
           progress_lock_.load(std::memory_order_relaxed);
  }
  Endpoint& endpoint() const { return *endpoint_; }
  const std::atomic<uint32_t>& in_flight() const { return in_flight_; }

 private:
  static constexpr int64_t kSliceNs = 20'000'000;

  // Holds the progress lock, where it was free, until the end of the scope at the latest.
  class ProgressLock {
   public:
    explicit ProgressLock(Engine& engine)
        : engine_(engine.try_lock_progress() ? &engine : nullptr) {}
    // Of one that was taken by try_begin_inline().
    struct Taken {};
    ProgressLock(Engine& engine, Taken) : engine_(&engine) {}
    ~ProgressLock() { release(); }
    ProgressLock(const ProgressLock&) = delete;
    ProgressLock& operator=(const ProgressLock&) = delete;
    explicit operator bool() const { return engine_ != nullptr; }
    void release() {
      if (engine_ != nullptr) {
        std::exchange(engine_, nullptr)->unlock_progress();
      }
    }
    // Wakes no thread: for one that takes it again soon, or is about to sleep.
    void release_quietly(std::memory_order order = std::memory_order_release) {
      std::exchange(engine_, nullptr)->progress_lock_.store(false, order);
    }

   private:
    Engine* engine_;
  };
  bool try_lock_progress() { return !progress_lock_.exchange(true, std::memory_order_acquire); }
  void unlock_progress();
  void take_submissions();
  bool advance_all();
  bool polls_in_vain(int rounds);
  bool watch(int& rounds);
  bool step(size_t index);
  static Operation::Progress advance_or_fail(Operation& operation);
  static void pause_between_polls();
  void yield();
  bool may_yield() const;  // not for a while after a yield that took long: then threads sleep
  void count_in_flight(Operation& operation);
  bool is_progress_lock_wanted() const {
    return waiters_.load(std::memory_order_relaxed) > 0 ||
           submitted_.load(std::memory_order_relaxed) != nullptr;
  }
  void complete(size_t index, Operation::Status status);
  void record_blocked(Operation& operation);
  void record_end_of_wait(Operation& operation);
  // Both return whether an operation went on.
  bool look_for_trouble();
  bool find_missing_peers();
  bool relieve_all();
  int64_t next_event_ns() const;
  enum class Sleeper { waits, progress_thread };
  void sleep_on_bell(ProgressLock& lock, int64_t until_ns, Sleeper sleeper);  // gives the lock back
  void progress_loop();
  void wake_progress_thread();
  void leave_rest_to_progress_thread();
  void call_interrupt(const Interrupt& interrupt);

  std::shared_ptr<Endpoint> endpoint_;
  int polls_;           // of a waiting thread before it sleeps
  int polls_again_;     // when something has come
  bool has_short_way_;  // may operations run inline?
  alignas(64) std::atomic<Operation*> submitted_{nullptr};
  std::atomic<uint32_t> in_flight_{0};
  alignas(64) std::atomic<bool> progress_lock_{false};
  std::atomic<uint32_t> waiters_{0};     // threads that want the progress lock
  std::atomic<uint32_t> sleepers_{0};    // threads of this process on the doorbell
  std::atomic<uint32_t> background_{0};  // operations that may have no waiting thread
  std::atomic<int64_t> yields_again_ns_{0};
  alignas(64) std::atomic<uint32_t> progress_word_{0};
  std::atomic<bool> progress_idle_{false};
  std::atomic<bool> stopping_{false};
  std::once_flag progress_started_;
  std::thread progress_thread_;
  // Under the progress lock:
  std::vector<std::shared_ptr<Operation>> active_;
  uint32_t rounds_ = 0;
  uint32_t inline_runs_ = 0;
  int64_t last_check_ns_ = 0;
};

}  // namespace dpcore
