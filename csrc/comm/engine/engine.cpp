// See engine.h for the rules. The order of checks in wait() and progress_loop() is the
// interesting part: publish, fence, poll, sleep - on both sides of every sleep. What a waiting
// thread looks for every kSliceNs is in engine_trouble.cpp.
#include "comm/engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/processors.h"
#include "comm/base/spin_lock.h"
#include "comm/base/thread.h"

namespace dpcore {
namespace {

// 150 us: longer than a thread takes to wake up, or two ranks keep sending each other to sleep.
constexpr int kPollsOfNetwork = 400;
constexpr int kPollsAgainOfNetwork = 8;     // in a wait for much, when some of it has come
constexpr int kPollsPerProcessorCheck = 8;  // of which rank is on which processor
constexpr int kRunsPerRecord = 16;          // of the own processor, which takes 7 ns
// With more ranks than processors the peer needs ours: give it away a few times, then sleep.
constexpr int kYieldsWhenCrowded = 40;
constexpr int64_t kLongYieldNs = 2'000'000;
constexpr int64_t kRestAfterYield = 20;  // so long yields take a twentieth of the time
constexpr int kRoundsPerCheck = 256;

}  // namespace

Engine::Engine(std::shared_ptr<Endpoint> endpoint)
    : endpoint_(std::move(endpoint)),
      polls_(endpoint_->network() == nullptr ? kPollsBeforeSleep : kPollsOfNetwork),
      polls_again_(endpoint_->network() == nullptr ? kPollsBeforeSleep : kPollsAgainOfNetwork),
      has_short_way_(endpoint_->network() == nullptr) {}

Engine::~Engine() {
  stopping_.store(true);
  if (progress_thread_.joinable()) {
    if (endpoint_->is_forked_copy()) {
      // The thread lives in the parent only, and its handle may name another one here by now:
      // it is neither joined nor detached, but forgotten.
      (void)new std::thread(std::move(progress_thread_));
    } else {
      wake_progress_thread();
      endpoint_->wake_own_threads();
      progress_thread_.join();
    }
  }
}

void Engine::submit(std::shared_ptr<Operation> operation, bool background) {
  Operation* raw = operation.get();
  raw->self = std::move(operation);
  raw->begun_ns = endpoint_->trace().recording() ? now_ns() : 0;
  raw->over_ns = 0;
  raw->blocked_since_ns = 0;
  raw->in_background = background;
  endpoint_->record_processor();
  raw->status.store(Operation::pending, std::memory_order_relaxed);
  count_in_flight(*raw);
  if (background) {
    background_.fetch_add(1, std::memory_order_seq_cst);
  }
  Operation* head = submitted_.load(std::memory_order_relaxed);
  do {
    raw->next_submitted = head;
  } while (!submitted_.compare_exchange_weak(head, raw, std::memory_order_seq_cst));
  if (background) {
    if (progress_idle_.load(std::memory_order_seq_cst)) {
      wake_progress_thread();
    } else if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      endpoint_->wake_own_threads();
    }
  }
}

void Engine::count_in_flight(Operation& operation) {
  operation.counted = 1;
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  operation.group().in_flight.fetch_add(1, std::memory_order_relaxed);
}

// ---- inline ----------------------------------------------------------------------------------

// One synchronous operation on the caller's thread while nothing else is in flight: what a small
// collective costs is decided here, so there is one atomic exchange on the way in, one on the
// way out, and no list in between.

bool Engine::try_begin_inline() {
  if (in_flight_.load(std::memory_order_relaxed) != 0 || !has_short_way_ ||
      endpoint_->trace().recording() || !try_lock_progress()) {
    return false;
  }
  if (active_.empty()) {
    return true;
  }
  unlock_progress();
  return false;
}

Operation::Status Engine::run_inline(Operation& running, int polls,
                                     std::shared_ptr<Operation>& pending) {
  ProgressLock lock(*this, ProgressLock::Taken{});
  running.begun_ns = 0;
  running.blocked_since_ns = 0;
  running.in_background = false;
  running.counted = 0;
  if (++inline_runs_ % kRunsPerRecord == 0) {
    endpoint_->record_processor();
  }
  for (int rounds = 0; rounds < polls && !is_progress_lock_wanted();) {
    const Operation::Progress progress = advance_or_fail(running);
    const bool failed = running.group().failed();
    if (failed || progress == Operation::Progress::finished) {
      const auto status = failed ? Operation::failed : Operation::done;
      running.retire();
      running.status.store(status, std::memory_order_release);
      return status;
    }
    if (progress == Operation::Progress::blocked) {
      if (endpoint_->oversubscribed() || polls_in_vain(++rounds)) {
        break;
      }
      pause_between_polls();
    }
  }
  pending = running.shared_from_this();
  running.self = pending;
  count_in_flight(running);
  active_.push_back(pending);
  return Operation::pending;
}

// ---- waiting ---------------------------------------------------------------------------------

bool Engine::wait(Operation& operation, int64_t deadline_ns, const Interrupt& interrupt) {
  if (operation.is_complete()) {
    return true;
  }
  const bool crowded = endpoint_->oversubscribed();
  bool in_time = true;
  {
    const ScopedCount waiting(waiters_);
    int idle_rounds = 0;
    int64_t next_check_ns = 0;
    while (!operation.is_complete()) {
      if (ProgressLock lock(*this); lock) {
        take_submissions();
        if (advance_all() || (!crowded && watch(idle_rounds))) {
          idle_rounds = crowded ? 0 : std::min(idle_rounds, polls_ - polls_again_);
          if (!operation.is_complete() && waiters_.load(std::memory_order_relaxed) <= 1) {
            lock.release_quietly();
          }
          continue;
        }
        ++idle_rounds;
        if (crowded ? idle_rounds < kYieldsWhenCrowded && may_yield() : idle_rounds < polls_) {
          lock.release_quietly();
          if (crowded) {
            yield();
          } else {
            pause_briefly();
          }
          continue;
        }
        sleep_on_bell(lock, now_ns() + kSliceNs, Sleeper::waits);
      } else if (++idle_rounds < polls_ && may_yield()) {
        yield();  // another thread is within a segment: it will see that we want the lock
      } else {
        const ScopedCount asleep(sleepers_);
        const uint32_t seen = endpoint_->bell().rings.load(std::memory_order_seq_cst);
        if (!operation.is_complete() && progress_lock_.load(std::memory_order_seq_cst)) {
          futex_wait(endpoint_->bell().rings, seen, kSliceNs);
        }
      }
      const int64_t now = now_ns();
      if (now >= next_check_ns) {
        next_check_ns = now + kSliceNs;
        if (interrupt) {
          call_interrupt(interrupt);
        }
        if (now >= deadline_ns && !operation.is_complete()) {
          in_time = false;
          break;
        }
      }
    }
  }
  leave_rest_to_progress_thread();
  return in_time;
}

// It may take long: Python's lock may be another thread's. Meanwhile the progress thread, where
// there is one, drives what this thread waits for as well.
void Engine::call_interrupt(const Interrupt& interrupt) {
  const ScopedCount left_behind(background_);
  waiters_.fetch_sub(1, std::memory_order_seq_cst);
  leave_rest_to_progress_thread();
  try {
    interrupt();
  } catch (...) {
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    throw;
  }
  waiters_.fetch_add(1, std::memory_order_seq_cst);
}

// A yield gives the processor to another thread until that waits, or has had its time slice: some
// milliseconds, where something on this machine only computes.
void Engine::yield() {
  const int64_t begin = now_ns();
  sched_yield();
  const int64_t end = now_ns();
  if (end - begin > kLongYieldNs) {
    yields_again_ns_.store(end + kRestAfterYield * (end - begin), std::memory_order_relaxed);
  }
}

bool Engine::may_yield() const {
  return now_ns() >= yields_again_ns_.load(std::memory_order_relaxed);
}

// The thread that waited has driven everything in flight; now another one has to.
void Engine::leave_rest_to_progress_thread() {
  if (background_.load(std::memory_order_seq_cst) > 0 &&
      progress_idle_.load(std::memory_order_seq_cst)) {
    wake_progress_thread();
  }
}

// The pauses leave the processor's units to a sibling thread, which may be the very rank that we
// wait for.
void Engine::pause_between_polls() {
  pause_briefly();
  pause_briefly();
}

// A peer on the same processor gets it sooner when this thread sleeps.
bool Engine::polls_in_vain(int rounds) {
  return rounds % kPollsPerProcessorCheck == 0 && !endpoint_->part_from_peers();
}

// Polls again and again, under the progress lock, until something moved, patience is over, or
// another thread has work or wants the lock.
bool Engine::watch(int& rounds) {
  while (rounds < polls_ && waiters_.load(std::memory_order_relaxed) == 1 &&
         submitted_.load(std::memory_order_relaxed) == nullptr) {
    if (polls_in_vain(++rounds)) {
      rounds = polls_;
      return false;
    }
    pause_between_polls();
    if (advance_all()) {
      return true;
    }
  }
  return false;
}

void Engine::unlock_progress() {
  progress_lock_.store(false, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    endpoint_->wake_own_threads();
  }
}

void Engine::take_submissions() {
  if (submitted_.load(std::memory_order_relaxed) == nullptr) {
    return;
  }
  Operation* newest = submitted_.exchange(nullptr, std::memory_order_acquire);
  Operation* oldest = nullptr;
  while (newest != nullptr) {  // the stack holds the newest first
    Operation* next = newest->next_submitted;
    newest->next_submitted = oldest;
    oldest = newest;
    newest = next;
  }
  while (oldest != nullptr) {
    Operation* next = oldest->next_submitted;
    oldest->next_submitted = nullptr;
    const auto position = std::upper_bound(
        active_.begin(), active_.end(), oldest->priority,
        [](int priority, const auto& other) { return priority > other->priority; });
    active_.insert(position, std::move(oldest->self));
    oldest = next;
  }
}

bool Engine::advance_all() {
  if (Network* network = endpoint_->network()) {
    network->poll();
  }
  if (++rounds_ % kRoundsPerCheck == 0 && now_ns() - last_check_ns_ > kSliceNs &&
      look_for_trouble()) {
    return true;
  }
  for (size_t i = 0; i < active_.size(); ++i) {
    if (step(i)) {
      return true;  // start again with the most urgent one
    }
  }
  return false;
}

Operation::Progress Engine::advance_or_fail(Operation& operation) {
  try {  // not after a failure: what it has sent half of was given up
    return operation.group().failed() ? Operation::Progress::blocked : operation.advance();
  } catch (const Mismatch& problem) {
    operation.group().fail(ErrorKind::mismatch, operation.group().rank(), problem.what(),
                           operation.place_in_group());
  } catch (const std::exception& problem) {
    operation.group().fail(ErrorKind::other, operation.group().rank(),
                           operation.describe() + ": " + problem.what(),
                           operation.place_in_group());
  }
  return Operation::Progress::blocked;
}

bool Engine::step(size_t index) {
  Operation& operation = *active_[index];
  const Operation::Progress progress = advance_or_fail(operation);
  if (operation.group().failed()) [[unlikely]] {
    complete(index, Operation::failed);
    return true;
  }
  if (progress == Operation::Progress::blocked) {
    record_blocked(operation);
    return false;
  }
  record_end_of_wait(operation);
  if (progress == Operation::Progress::finished) {
    complete(index, Operation::done);
  }
  return true;
}

void Engine::record_blocked(Operation& operation) {
  if (endpoint_->trace().recording() && operation.blocked_since_ns == 0) {
    operation.blocked_since_ns = now_ns();
    operation.blocked_at = operation.waiting();
  }
}

void Engine::record_end_of_wait(Operation& operation) {
  if (operation.blocked_since_ns != 0) {
    endpoint_->trace().add({operation.blocked_at.name, EventKind::wait, operation.blocked_at.peer,
                            0, operation.trace_number(), operation.trace_bytes(),
                            operation.blocked_since_ns, now_ns()});
    operation.blocked_since_ns = 0;
  }
}

void Engine::complete(size_t index, Operation::Status status) {
  const std::shared_ptr<Operation> operation = std::move(active_[index]);
  active_.erase(active_.begin() + static_cast<ptrdiff_t>(index));
  record_end_of_wait(*operation);  // of one that failed: the wait that it never came out of
  if (operation->begun_ns != 0) {
    TraceEvent event;
    event.name = operation->trace_name();
    event.kind = EventKind::operation;
    event.operation = operation->trace_number();
    event.bytes = operation->trace_bytes();
    event.begin_ns = operation->begun_ns;
    event.end_ns = now_ns();
    operation->tell_what_ran(event);
    endpoint_->trace().add(event);
  }
  const bool background = operation->in_background;
  if (background) {
    operation->over_ns = now_ns();
  }
  operation->retire();
  operation->self.reset();
  operation->status.store(status, std::memory_order_seq_cst);
  operation->run_callback();
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  operation->group().in_flight.fetch_sub(1, std::memory_order_release);
  if (background) {
    background_.fetch_sub(1, std::memory_order_seq_cst);
  }
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    endpoint_->wake_own_threads();
  }
}

namespace {

// A sleep ends some time after it should; a thread that waits spends the rest polling. The progress
// thread does not: the program computes beside it, and needs the processor.
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

// A thread that wants the lock, and did not get it while this thread polled, sleeps until the bell
// rings. A thread that waits need not ring: it goes on driving the operations of all. The progress
// thread leaves them to threads that wait, so it rings instead of going to sleep.
void Engine::sleep_on_bell(ProgressLock& lock, int64_t until_ns, Sleeper sleeper) {
  if (relieve_all() || (now_ns() - last_check_ns_ >= kSliceNs && look_for_trouble())) {
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
  const int64_t early = sleeper == Sleeper::waits ? kWakeEarlyNs : 0;
  const int64_t left = std::min(until_ns, next_event - early) - now_ns();
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
  wake_promptly();
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
