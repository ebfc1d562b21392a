// See stream_watch.h.
#include "cuda/stream/stream_watch.h"

#include <algorithm>
#include <chrono>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "comm/base/thread.h"

namespace dpcore {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(20);

uint64_t hash_of(const Fingerprint& what) {
  Fnv hash;
  hash.add(static_cast<uint64_t>(what.collective | what.dtype << 8 | what.op << 16));
  hash.add(static_cast<uint64_t>(what.root)).add(what.count).add(what.layout).add(what.algorithm);
  return hash.value() | 1;  // 0 is a slot that no rank has written
}

}  // namespace

// ---- one operation ---------------------------------------------------------------------------

StreamWork::~StreamWork() {
  if (event != nullptr) {
    device->destroy_event(event);
  }
}

std::string StreamWork::describe() const {
  return message.empty() ? Group::describe(number, what) : message;
}

void StreamWork::when_complete(std::function<void()> call) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_complete()) {
      calls_.push_back(std::move(call));
      return;
    }
  }
  call();
}

void StreamWork::complete(State how) {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state.store(how, std::memory_order_release);
    calls.swap(calls_);
  }
  for (const auto& call : calls) {
    call();
  }
}

// ---- announcing ------------------------------------------------------------------------------

StreamWatch::StreamWatch(std::shared_ptr<Communicator> black_box, std::shared_ptr<Device> device,
                         Watched& watched)
    : black_box_(std::move(black_box)),
      device_(std::move(device)),
      watched_(watched),
      thread_(std::make_unique<std::thread>(
          start_thread("dpcore-device", "watches operations of a device", [this] { run(); }))) {}

StreamWatch::~StreamWatch() { close(0); }

void StreamWatch::announce(uint64_t number, const Fingerprint& what, uint64_t bytes) {
  Group& group = this->group();
  group.mine().record_entered(number, what, bytes, now_roughly_ns());
  const uint64_t own = hash_of(what);
  OperationSlot& slot = group.slot(group.rank(), number);
  // A reader that finds the number before and after reading the hash has read this one.
  slot.posted.store(0);
  slot.arguments.store(own);
  slot.posted.store(number + 1);
  for (int r = 0; r < group.world(); ++r) {
    if (r == group.rank()) {
      continue;
    }
    const OperationSlot& theirs = group.slot(r, number);
    const bool is_there = theirs.posted.load() == number + 1;
    const uint64_t hash = theirs.arguments.load();
    if (is_there && theirs.posted.load() == number + 1 && hash != own) {
      fail(ErrorKind::mismatch, r,
           "rank " + std::to_string(group.rank()) + " calls " + Group::describe(number, what) +
               ", rank " + std::to_string(r) + " does not: " + group.last_operation_of(r) +
               ". All ranks have to call the same operations in the same order, with the same "
               "sizes, types and algorithms, and with memory of empty() at the same place or none");
      group.failure().raise();
    }
  }
}

void StreamWatch::add(std::shared_ptr<StreamWork> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  in_flight_.push_back(std::move(work));
  if (in_flight_.size() == 1) {
    changed_.notify_one();
  }
}

// ---- looking ---------------------------------------------------------------------------------

void StreamWatch::run() {
  try {
    device_->attach();  // for as long as this thread lives
  } catch (const Error& problem) {
    fail(ErrorKind::other, group().rank(), problem.what());
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    if (in_flight_.empty()) {
      changed_.wait(lock, [this] { return closing_ || !in_flight_.empty(); });
    } else {
      changed_.wait_for(lock, kInterval, [this] { return closing_; });
    }
    lock.unlock();
    look();
    lock.lock();
  }
}

bool StreamWatch::has_all_happened() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return in_flight_.empty() || device_->has_happened(in_flight_.back()->event);
}

void StreamWatch::look() {
  const std::lock_guard<std::mutex> one_at_a_time(looking_);
  completed_.clear();
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t done = 0;
    while (done < in_flight_.size() && device_->has_happened(in_flight_[done]->event)) {
      ++done;
    }
    completed_.assign(in_flight_.begin(), in_flight_.begin() + static_cast<ptrdiff_t>(done));
    in_flight_.erase(in_flight_.begin(), in_flight_.begin() + static_cast<ptrdiff_t>(done));
  } catch (const Error& problem) {
    fail(ErrorKind::other, group().rank(), problem.what());
  }
  const StreamWork::State how =
      completed_.empty() || have_results() ? StreamWork::done : StreamWork::failed;
  for (const auto& work : completed_) {
    if (work->message.empty()) {
      group().finish_operation(work->number);
    }
    work->complete(how);
  }
  completed_.clear();  // back to the pool
  std::shared_ptr<StreamWork> first;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!in_flight_.empty()) {
      first = in_flight_.front();
    }
  }
  if (first && !group().failed()) {
    look_at_peers(*first);
    look_at_deadlines();
  }
  if (!group().failed()) {
    return;
  }
  stop_once();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    completed_.swap(in_flight_);
    in_flight_.clear();
  }
  for (const auto& work : completed_) {
    if (!work->is_complete()) {
      work->complete(StreamWork::failed);
    }
  }
  completed_.clear();
}

// What has just ended: by itself, or because the device has been told not to wait?
bool StreamWatch::have_results() {
  if (stopped_.load()) {
    return false;
  }
  if (watched_.lets_pass() && (group().failed() || group().adopt_failure_of_peer())) {
    return false;
  }
  return !look_for_trouble();
}

void StreamWatch::look_at_peers(const StreamWork& waiting) {
  Group& group = this->group();
  if (group.fails_during("while " + waiting.describe() + " was in flight on " + device_->name())) {
    return;
  }
  for (int r = 0; r < group.world(); ++r) {
    // A rank that has left and done its part may end while this rank still waits for its device.
    if (r != group.rank() && group.has_left(r) && has_not_called(r, waiting)) {
      fail(ErrorKind::peer_lost, r,
           "rank " + std::to_string(r) + " left (finalized) before " + waiting.describe());
      return;
    }
  }
  look_for_trouble();
}

bool StreamWatch::look_for_trouble() {
  const Trouble trouble = watched_.trouble();
  if (trouble.what.empty()) {
    return false;
  }
  const int culprit = trouble.culprit >= 0 ? trouble.culprit : group().rank();
  fail(trouble.kind, culprit, "on rank " + std::to_string(group().rank()) + " " + trouble.what);
  return true;
}

void StreamWatch::look_at_deadlines() {
  std::shared_ptr<StreamWork> late;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t now = now_ns();
    const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                    [now](const auto& work) { return work->deadline_ns <= now; });
    if (found != in_flight_.end()) {
      late = *found;
    }
  }
  if (!late) {
    return;
  }
  fail_as_late(*late, in_seconds(late->timeout_s) + " after it was called");
}

void StreamWatch::fail_as_late(const StreamWork& late, const std::string& when) {
  int culprit = -1;
  for (int r = 0; r < group().world() && culprit < 0; ++r) {
    if (has_not_called(r, late)) {
      culprit = r;
    }
  }
  if (culprit < 0) {
    culprit = watched_.late_peer();
  }
  fail(ErrorKind::timeout, culprit,
       late.describe() + " was not complete on " + device_->name() + " " + when + "; " +
           describe_late_ranks(late));
}

// Messages have no number that both sides know.
bool StreamWatch::has_not_called(int r, const StreamWork& work) const {
  return work.message.empty() && r != group().rank() &&
         group().control(r).operations_seen.load(std::memory_order_acquire) <= work.number;
}

std::string StreamWatch::describe_late_ranks(const StreamWork& work) const {
  if (!work.message.empty()) {
    return "the other side may not have called it";
  }
  std::string late;
  for (int r = 0; r < group().world(); ++r) {
    if (!has_not_called(r, work)) {
      continue;
    }
    late += (late.empty() ? "rank " : "; rank ") + std::to_string(r) + " has not called it (" +
            group().last_operation_of(r) + ")";
  }
  if (!late.empty()) {
    return late;
  }
  const int peer = watched_.late_peer();
  return "all ranks have called it, so a device or the link between two is stuck" +
         (peer < 0 ? ""
                   : " (the kernel here waits for that of rank " + std::to_string(peer) + ")") +
         "; pass timeout= if it only needs longer";
}

void StreamWatch::fail(ErrorKind kind, int culprit, const std::string& reason) {
  group().fail(kind, culprit, reason);
  watched_.let_pass();
}

void StreamWatch::give_up(const std::string& how) {
  group().give_up(how);
  watched_.let_pass();
}

void StreamWatch::stop_once() {
  if (stopped_.exchange(true)) {
    return;
  }
  try {
    watched_.stop();
  } catch (const Error&) {  // the device itself is broken: nothing runs there any more
  }
}

void StreamWatch::close(int64_t deadline_ns) {
  if (!thread_) {
    return;
  }
  if (group().endpoint().is_forked_copy()) {
    thread_.release();  // there is no such thread in this process
    return;
  }
  while (true) {
    std::shared_ptr<StreamWork> oldest;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (in_flight_.empty()) {
        break;
      }
      oldest = in_flight_.front();
    }
    if (now_ns() > deadline_ns && !group().failed()) {
      fail_as_late(*oldest, "when close() had waited as long as a call may take");
    }
    look();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (group().failed()) {
    stop_once();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  thread_->join();
  thread_.reset();
}

}  // namespace dpcore
