// The ring behind TraceRecorder.
#include "comm/group/trace.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace dpcore {
namespace {

uint32_t thread_number() {
  static thread_local const uint32_t number = static_cast<uint32_t>(syscall(SYS_gettid));
  return number;
}

}  // namespace

void TraceRecorder::start(size_t capacity) {
  recording_.store(false);
  wait_for_writers();
  if (capacity != capacity_) {
    ring_ = std::make_unique<TraceEvent[]>(capacity);
    capacity_ = capacity;
  }
  next_.store(0);
  take_schedules();
  recording_.store(true);
}

void TraceRecorder::add(const TraceEvent& event) {
  if (!recording()) {
    return;
  }
  writers_.fetch_add(1, std::memory_order_seq_cst);
  if (recording_.load(std::memory_order_seq_cst)) {
    TraceEvent& slot = ring_[next_.fetch_add(1, std::memory_order_relaxed) % capacity_];
    slot = event;
    slot.thread = thread_number();
  }
  writers_.fetch_sub(1, std::memory_order_release);
}

void TraceRecorder::keep(uint64_t identity, const std::shared_ptr<const Schedule>& schedule) {
  if (!recording()) {
    return;
  }
  writers_.fetch_add(1, std::memory_order_seq_cst);
  if (recording_.load(std::memory_order_seq_cst)) {
    for (Kept& kept : kept_) {
      uint64_t holds = kept.identity.load(std::memory_order_relaxed);
      if (holds == 0 && kept.identity.compare_exchange_strong(holds, identity)) {
        kept.schedule = schedule;
        break;
      }
      if (holds == identity) {
        break;
      }
    }
  }
  writers_.fetch_sub(1, std::memory_order_release);
}

std::vector<std::pair<uint64_t, std::shared_ptr<const Schedule>>> TraceRecorder::take_schedules() {
  std::vector<std::pair<uint64_t, std::shared_ptr<const Schedule>>> taken;
  for (Kept& kept : kept_) {
    if (const uint64_t identity = kept.identity.exchange(0)) {
      taken.emplace_back(identity, std::move(kept.schedule));
      kept.schedule.reset();
    }
  }
  return taken;
}

void TraceRecorder::wait_for_writers() const {
  while (writers_.load(std::memory_order_seq_cst) != 0) {
    sched_yield();
  }
}

std::vector<TraceEvent> TraceRecorder::stop(uint64_t* dropped) {
  recording_.store(false);
  wait_for_writers();
  const uint64_t total = next_.load();
  const size_t kept = std::min<uint64_t>(total, capacity_);
  *dropped = total - kept;
  std::vector<TraceEvent> events(ring_.get(), ring_.get() + kept);
  std::stable_sort(events.begin(), events.end(), [](const TraceEvent& a, const TraceEvent& b) {
    return a.begin_ns < b.begin_ns;
  });
  return events;
}

}  // namespace dpcore
