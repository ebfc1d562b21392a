// Who executes operations: the thread that waits for one, or else the progress thread.
//
// One engine per endpoint. Operations are submitted by any thread through a lock-free stack;
// the *seat* (an atomic flag) says which one thread may advance them. wait() takes the seat
// and drives everything in flight until its operation is complete, so a small synchronous
// operation runs on the caller's thread without a hop. Asynchronous operations are driven by
// the progress thread, which is started by the first of them, never spins, and gives the seat
// up between two segments as soon as somebody waits.
//
// Sleeping: all threads of the endpoint sleep on its doorbell (rung by peers, by submissions
// and by completions); the progress thread without anything to do sleeps on a word of its own.
// No thread holds the seat while it sleeps. A sleeper looks every kSliceNs at deadlines, at
// the death of peers, and for signals.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/engine/operation.h"

namespace dpcore {

class Count {  // counts a scope in an atomic
 public:
  explicit Count(std::atomic<uint32_t>& counter) : counter_(counter) {
    counter_.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Count() { counter_.fetch_sub(1, std::memory_order_seq_cst); }
  Count(const Count&) = delete;
  Count& operator=(const Count&) = delete;

 private:
  std::atomic<uint32_t>& counter_;
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Endpoint> endpoint);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // How often a waiting caller looks before it sleeps, with a processor for every rank: longer
  // than a small operation, shorter than a time slice. (Over TCP it looks fewer times.)
  static constexpr int kLooksBeforeSleep = 1500;

  // Called now and then while a thread waits; throws to give up (Ctrl-C).
  using Interrupt = std::function<void()>;

  // On a slow link a thread that waits is to leave its processor to others at once.
  void sleep_early() {
    looks_ = 1;
    has_short_way_ = false;
  }

  // There is a progress thread from here on; throws an Error where it can't be started.
  void be_ready_for_background();
  // Hands over an operation. `background`: somebody may never wait for it, so the progress
  // thread has to drive it, which was made ready before. Throws nothing: the operation has its
  // number, which the other ranks wait for.
  void submit(std::shared_ptr<Operation> operation, bool background);
  // The short way for a synchronous operation while nothing else is in flight: without a list, a
  // queue or a count. try_sit_down() takes the seat, or says that this is not the moment;
  // run_seated() gives it back. True: the operation is complete. False: it is in flight, as after
  // submit(), since it did not come to an end within so many looks, or others want the seat.
  bool try_sit_down();
  bool run_seated(const std::shared_ptr<Operation>& operation, int looks);
  // Returns true when the operation is complete (also when it failed), false at the deadline.
  bool wait(Operation& operation, int64_t deadline_ns, const Interrupt& interrupt);
  // Until nothing of the group is in flight any more, or the deadline is over.
  void drain(const Group& group, int64_t deadline_ns, const Interrupt& interrupted = {});
  // Over TCP: takes in what has come that nobody asked for, unless a thread is in the seat, which
  // does so itself.
  void take_in_unexpected();

  // Whether a thread is within wait() or run_seated().
  bool somebody_waits() const {
    return waiters_.load(std::memory_order_relaxed) > 0 || seat_.load(std::memory_order_relaxed);
  }
  Endpoint& endpoint() const { return *endpoint_; }
  const std::atomic<uint32_t>& in_flight() const { return in_flight_; }

 private:
  static constexpr int64_t kSliceNs = 20'000'000;

  // The right to advance operations, where it was free; given back at the end of the scope at the
  // latest.
  class Seat {
   public:
    explicit Seat(Engine& engine) : engine_(engine.try_take_seat() ? &engine : nullptr) {}
    // Of a seat that was taken by try_sit_down().
    struct Taken {};
    Seat(Engine& engine, Taken) : engine_(&engine) {}
    ~Seat() { give_back(); }
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    explicit operator bool() const { return engine_ != nullptr; }
    void give_back() {
      if (engine_ != nullptr) {
        std::exchange(engine_, nullptr)->release_seat();
      }
    }
    // Wakes nobody: for who takes it again soon, or is about to sleep.
    void give_back_quietly(std::memory_order order = std::memory_order_release) {
      std::exchange(engine_, nullptr)->seat_.store(false, order);
    }

   private:
    Engine* engine_;
  };
  bool try_take_seat() { return !seat_.exchange(true, std::memory_order_acquire); }
  void release_seat();
  void take_submissions();
  bool advance_all();
  bool watch(int& rounds);
  bool step(size_t index);
  static Operation::Progress advance_or_fail(Operation& operation);
  static void pause_between_looks();
  void count_in_flight(Operation& operation);
  bool is_seat_wanted() const {
    return waiters_.load(std::memory_order_relaxed) > 0 ||
           submitted_.load(std::memory_order_relaxed) != nullptr;
  }
  void complete(size_t index, Operation::Status status);
  void note_blocked(Operation& operation);
  void note_end_of_wait(Operation& operation);
  // Both return whether an operation went on.
  bool look_for_trouble();
  bool find_missing_peers();
  bool relieve_all();
  int64_t next_event_ns() const;
  void sleep_on_bell(Seat& seat, int64_t until_ns);  // gives the seat back
  void progress_loop();
  void wake_progress_thread();
  void leave_rest_to_progress_thread();

  std::shared_ptr<Endpoint> endpoint_;
  int looks_;           // of a waiting thread before it sleeps
  bool has_short_way_;  // may operations run seated?
  alignas(64) std::atomic<Operation*> submitted_{nullptr};
  std::atomic<uint32_t> in_flight_{0};
  alignas(64) std::atomic<bool> seat_{false};
  std::atomic<uint32_t> waiters_{0};     // threads that want the seat
  std::atomic<uint32_t> sleepers_{0};    // threads of this process on the doorbell
  std::atomic<uint32_t> background_{0};  // operations that nobody may wait for
  alignas(64) std::atomic<uint32_t> progress_word_{0};
  std::atomic<bool> progress_idle_{false};
  std::atomic<bool> stopping_{false};
  std::once_flag progress_started_;
  std::thread progress_thread_;
  // Under the seat:
  std::vector<std::shared_ptr<Operation>> active_;
  uint32_t rounds_ = 0;
  int64_t last_look_ns_ = 0;
};

}  // namespace dpcore
