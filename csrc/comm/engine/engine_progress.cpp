// How threads of the endpoint sleep, the progress thread, and waiting for the end of everything.
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/thread.h"
#include "comm/engine/engine.h"

namespace dpcore {
namespace {

// A sleep ends some time after it should; the rest is spent looking.
constexpr int64_t kWakeEarlyNs = 15'000;

// By default the kernel adds up to 50 us to every sleep of a thread.
void sleep_precisely() {
  static thread_local const int done = prctl(PR_SET_TIMERSLACK, 1);
  (void)done;
}

class Announced {  // at the bell, that this thread is about to sleep
 public:
  explicit Announced(Doorbell& bell) : bell_(bell), seen_(bell.announce_sleep()) {}
  ~Announced() { withdraw(); }
  Announced(const Announced&) = delete;
  Announced& operator=(const Announced&) = delete;
  uint32_t seen() const { return seen_; }
  void withdraw() {
    if (stands_) {
      bell_.withdraw();
      stands_ = false;
    }
  }

 private:
  Doorbell& bell_;
  uint32_t seen_;
  bool stands_ = true;
};

}  // namespace

// Whoever wants the lock, and did not get it while this thread looked, sleeps until it is rung for.
// A thread that waits need not ring: it goes on driving the operations of all. The progress thread
// leaves them to those who wait, so it rings instead of going to sleep.
void Engine::sleep_on_bell(ProgressLock& lock, int64_t until_ns, Sleeper sleeper) {
  if (relieve_all() || (now_ns() - last_look_ns_ >= kSliceNs && look_for_trouble())) {
    lock.release();
    return;
  }
  const ScopedCount asleep(sleepers_);
  Announced announced(endpoint_->bell());
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  take_submissions();
  if (advance_all()) {
    announced.withdraw();  // or giving the lock back would wake this very thread
    lock.release();
    return;
  }
  const int64_t next_event = next_event_ns();
  lock.release_quietly(std::memory_order_seq_cst);
  if (sleeper == Sleeper::progress_thread && waiters_.load(std::memory_order_seq_cst) > 0) {
    endpoint_->wake_own_threads();
    return;
  }
  const int64_t left = std::min(until_ns, next_event - kWakeEarlyNs) - now_ns();
  if (next_event != INT64_MAX) {
    sleep_precisely();
  }
  if (left > 0 && submitted_.load(std::memory_order_seq_cst) == nullptr) {
    endpoint_->sleep(announced.seen(), left);
  }
}

void Engine::be_ready_for_background() {
  std::call_once(progress_started_, [this] {
    progress_thread_ = start_thread("dpcore-progress", "drives asynchronous operations",
                                    [this] { progress_loop(); });
  });
}

void Engine::wake_progress_thread() {
  progress_word_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(progress_word_);
}

void Engine::progress_loop() {
  pthread_setname_np(pthread_self(), "dpcore-progress");  // for traces, top and gdb
  while (!stopping_.load(std::memory_order_relaxed)) {
    const bool nothing_to_do = background_.load(std::memory_order_seq_cst) == 0;
    if (nothing_to_do || waiters_.load(std::memory_order_seq_cst) > 0) {
      const uint32_t seen = progress_word_.load(std::memory_order_seq_cst);
      progress_idle_.store(true, std::memory_order_seq_cst);
      if ((background_.load(std::memory_order_seq_cst) == 0 ||
           waiters_.load(std::memory_order_seq_cst) > 0) &&
          !stopping_.load(std::memory_order_seq_cst)) {
        futex_wait(progress_word_, seen, 1'000'000'000);
      }
      progress_idle_.store(false, std::memory_order_seq_cst);
      continue;
    }
    ProgressLock lock(*this);
    if (!lock) {
      sched_yield();
      continue;
    }
    take_submissions();
    while (waiters_.load(std::memory_order_relaxed) == 0 && advance_all()) {
      take_submissions();
    }
    if (waiters_.load(std::memory_order_seq_cst) > 0) {
      lock.release();
    } else {
      sleep_on_bell(lock, now_ns() + kSliceNs, Sleeper::progress_thread);
    }
  }
}

void Engine::drain(const Group& group, int64_t deadline_ns, const Interrupt& interrupted) {
  {
    const ScopedCount waiting(waiters_);
    bool took_lock = false;  // once at least: what runs inline is not counted
    while ((!took_lock || group.in_flight.load(std::memory_order_acquire) > 0) &&
           now_ns() < deadline_ns) {
      if (ProgressLock lock(*this); lock) {
        took_lock = true;
        take_submissions();
        if (!advance_all() && group.in_flight.load(std::memory_order_acquire) > 0) {
          sleep_on_bell(lock, std::min(deadline_ns, now_ns() + kSliceNs), Sleeper::waits);
        }
      } else {
        sched_yield();
      }
      if (interrupted) {
        interrupted();
      }
    }
  }
  leave_rest_to_progress_thread();
}

bool Engine::relieve_all() {
  bool changed = false;
  for (const auto& operation : active_) {
    changed |= operation->relieve();
  }
  return changed;
}

int64_t Engine::next_event_ns() const {
  int64_t next = INT64_MAX;
  for (const auto& operation : active_) {
    next = std::min(next, operation->next_event_ns());
  }
  return next;
}

}  // namespace dpcore
