// See engine.h for the rules. The order of checks in wait() and progress_loop() is the
// interesting part: publish, fence, look, sleep - on both sides of every sleep.
#include "comm/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

#include "comm/clock.h"
#include "comm/error.h"

namespace dpcore {
namespace {

// A look at the network costs as much as 20 looks at memory, and what comes takes longer.
constexpr int kLooksAtNetwork = 80;
// With more ranks than processors the peer needs ours: give it away a few times, then sleep.
constexpr int kYieldsWhenCrowded = 12;
constexpr int kRoundsPerLook = 256;

// A sleep ends some time after it should; the rest is spent looking.
constexpr int64_t kWakeEarlyNs = 15'000;

// By default the kernel adds up to 50 us to every sleep of a thread.
void sleep_precisely() {
  static thread_local const int done = prctl(PR_SET_TIMERSLACK, 1);
  (void)done;
}

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

}  // namespace

Engine::Engine(std::shared_ptr<Endpoint> endpoint)
    : endpoint_(std::move(endpoint)),
      looks_(endpoint_->network() == nullptr ? kLooksBeforeSleep : kLooksAtNetwork),
      has_short_way_(endpoint_->network() == nullptr && !endpoint_->oversubscribed()) {}

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
  raw->blocked_since_ns = 0;
  raw->in_background = background;
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
    start_progress_thread();
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

bool Engine::wait(Operation& operation, int64_t deadline_ns, const Interrupt& interrupt) {
  if (operation.is_complete()) {
    return true;
  }
  const bool crowded = endpoint_->oversubscribed();
  bool in_time = true;
  {
    const Count waiting(waiters_);
    int idle_rounds = 0;
    int64_t next_look_ns = 0;
    while (!operation.is_complete()) {
      if (try_take_seat()) {
        take_submissions();
        if (advance_all() || (!crowded && watch(idle_rounds))) {
          idle_rounds = 0;
          if (operation.is_complete() || waiters_.load(std::memory_order_relaxed) > 1) {
            release_seat();
          } else {
            seat_.store(false, std::memory_order_release);
          }
          continue;
        }
        ++idle_rounds;
        const bool patient = crowded ? idle_rounds < kYieldsWhenCrowded : idle_rounds < looks_;
        if (patient) {
          seat_.store(false, std::memory_order_release);
          if (crowded) {
            sched_yield();
          } else {
            pause_briefly();
          }
          continue;
        }
        sleep_on_bell(now_ns() + kSliceNs);  // gives the seat back
      } else if (++idle_rounds < looks_) {
        sched_yield();  // another thread is within a segment: it will see that we want the seat
      } else {
        const Count asleep(sleepers_);
        const uint32_t seen = endpoint_->bell().rings.load(std::memory_order_seq_cst);
        if (!operation.is_complete() && seat_.load(std::memory_order_seq_cst)) {
          futex_wait(endpoint_->bell().rings, seen, kSliceNs);
        }
      }
      const int64_t now = now_ns();
      if (now >= next_look_ns) {
        next_look_ns = now + kSliceNs;
        if (interrupt) {
          interrupt();
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

// Whoever waited has driven everything in flight; now somebody else has to.
void Engine::leave_rest_to_progress_thread() {
  if (background_.load(std::memory_order_seq_cst) > 0 &&
      progress_idle_.load(std::memory_order_seq_cst)) {
    wake_progress_thread();
  }
}

// Looks again and again, with the seat, until something moved, patience is over, or another
// thread has work or wants the seat.
bool Engine::watch(int& rounds) {
  while (rounds < looks_ && waiters_.load(std::memory_order_relaxed) == 1 &&
         submitted_.load(std::memory_order_relaxed) == nullptr) {
    ++rounds;
    pause_between_looks();
    if (advance_all()) {
      return true;
    }
  }
  return false;
}

void Engine::release_seat() {
  seat_.store(false, std::memory_order_seq_cst);
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
    const auto place = std::upper_bound(
        active_.begin(), active_.end(), oldest->priority,
        [](int priority, const auto& other) { return priority > other->priority; });
    active_.insert(place, std::move(oldest->self));
    oldest = next;
  }
}

bool Engine::advance_all() {
  if (Network* network = endpoint_->network()) {
    network->poll();
  }
  if (++rounds_ % kRoundsPerLook == 0 && now_ns() - last_look_ns_ > kSliceNs &&
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

bool Engine::step(size_t index) {
  Operation& operation = *active_[index];
  const Operation::Progress progress = advance_or_fail(operation);
  if (operation.group().failed()) [[unlikely]] {
    complete(index, Operation::failed);
    return true;
  }
  if (progress == Operation::Progress::blocked) {
    note_blocked(operation);
    return false;
  }
  note_end_of_wait(operation);
  if (progress == Operation::Progress::finished) {
    complete(index, Operation::done);
  }
  return true;
}

void Engine::note_blocked(Operation& operation) {
  if (endpoint_->trace().recording() && operation.blocked_since_ns == 0) {
    operation.blocked_since_ns = now_ns();
    operation.blocked_at = operation.waiting();
  }
}

void Engine::note_end_of_wait(Operation& operation) {
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
  note_end_of_wait(*operation);  // of one that failed: the wait that it never came out of
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

// Called with the seat, returns without it.
void Engine::sleep_on_bell(int64_t until_ns) {
  if (relieve_all() || (now_ns() - last_look_ns_ >= kSliceNs && look_for_trouble())) {
    release_seat();
    return;
  }
  Doorbell& bell = endpoint_->bell();
  const Count asleep(sleepers_);
  const uint32_t seen = bell.announce_sleep();
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  take_submissions();
  if (advance_all()) {
    bell.withdraw();
    release_seat();
    return;
  }
  const int64_t next_event = next_event_ns();
  seat_.store(false, std::memory_order_seq_cst);
  const int64_t left = std::min(until_ns, next_event - kWakeEarlyNs) - now_ns();
  if (next_event != INT64_MAX) {
    sleep_precisely();
  }
  if (left > 0 && submitted_.load(std::memory_order_seq_cst) == nullptr) {
    endpoint_->sleep(seen, left);
  }
  bell.withdraw();
}

void Engine::start_progress_thread() {
  std::call_once(progress_started_,
                 [this] { progress_thread_ = std::thread([this] { progress_loop(); }); });
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
    if (!try_take_seat()) {
      sched_yield();
      continue;
    }
    take_submissions();
    while (waiters_.load(std::memory_order_relaxed) == 0 && advance_all()) {
      take_submissions();
    }
    if (waiters_.load(std::memory_order_seq_cst) > 0) {
      release_seat();
    } else {
      sleep_on_bell(now_ns() + kSliceNs);
    }
  }
}

void Engine::drain(const Group& group, int64_t deadline_ns) {
  {
    const Count waiting(waiters_);
    bool sat_down = false;  // once at least: what runs seated is not counted
    while ((!sat_down || group.in_flight.load(std::memory_order_acquire) > 0) &&
           now_ns() < deadline_ns) {
      if (try_take_seat()) {
        sat_down = true;
        take_submissions();
        if (advance_all() || group.in_flight.load(std::memory_order_acquire) == 0) {
          release_seat();
        } else {
          sleep_on_bell(std::min(deadline_ns, now_ns() + kSliceNs));
        }
      } else {
        sched_yield();
      }
    }
  }
  leave_rest_to_progress_thread();
}

}  // namespace dpcore
