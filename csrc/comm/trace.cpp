// The ring behind TraceRecorder. start() and stop() are called by one thread while no
// operation of the endpoint is in flight on another (the Python context manager sees to it
// with a barrier on each side).
#include "comm/trace.h"

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
  if (capacity != capacity_) {
    if (ring_) {
      retired_.push_back(std::move(ring_));
    }
    ring_ = std::make_unique<TraceEvent[]>(capacity);
    capacity_ = capacity;
  }
  next_.store(0);
  recording_.store(true);
}

void TraceRecorder::add(const TraceEvent& event) {
  if (!recording()) {
    return;
  }
  TraceEvent& slot = ring_[next_.fetch_add(1, std::memory_order_relaxed) % capacity_];
  slot = event;
  slot.thread = thread_number();
}

std::vector<TraceEvent> TraceRecorder::stop(uint64_t* dropped) {
  recording_.store(false);
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
