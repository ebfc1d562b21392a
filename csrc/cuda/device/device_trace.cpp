// See device_trace.h.
#include "cuda/device/device_trace.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/base/clock.h"
#include "comm/base/error.h"

namespace dpcore {
namespace {

// The host sees an event some time after it has happened; the shortest time of these counts.
constexpr int kLooksForZero = 9;
constexpr auto kNap = std::chrono::microseconds(100);
constexpr size_t kWatched = 4096;  // spans: some steps of a model with many buckets

}  // namespace

DeviceTrace::~DeviceTrace() {
  for (const Entry& entry : ring_) {
    for (const Device::Event event : {entry.begins, entry.ends, entry.wait_begins}) {
      if (event != nullptr) {
        device_->destroy_event(event);
      }
    }
  }
  if (zero_ != nullptr) {
    device_->destroy_event(zero_);
  }
}

void DeviceTrace::start(size_t capacity) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard here(*device_);
  find_zero();
  is_traced_ = true;
  begin_ring(capacity);
}

void DeviceTrace::begin_ring(size_t capacity) {
  capacity_ = std::max<size_t>(capacity, 1);
  last_before_ = last_;
  for (Entry& entry : ring_) {
    entry.span = 0;
  }
  recording_.store(true);
}

// In a stream of its own: others hold work that it would wait for.
void DeviceTrace::find_zero() {
  const Device::Stream stream = device_->make_stream();
  Device::Event candidate = device_->make_timed_event();
  if (zero_ == nullptr) {
    zero_ = device_->make_timed_event();
  }
  int64_t shortest = INT64_MAX;
  const int64_t deadline = now_ns() + to_ns(patience_s_);
  bool is_late = false;
  for (int look = 0; look < kLooksForZero && !is_late; ++look) {
    const int64_t before = now_ns();
    device_->record(candidate, stream);
    // Without a rest, which would be longer than what is measured.
    while (!device_->has_happened(candidate) && !is_late) {
      is_late = now_ns() > deadline;
    }
    if (is_late) {
      break;
    }
    const int64_t after = now_ns();
    if (after - before < shortest) {
      shortest = after - before;
      zero_ns_ = before + shortest / 2;
      std::swap(zero_, candidate);
    }
  }
  device_->destroy_event(candidate);
  device_->destroy_stream(stream);
  if (shortest == INT64_MAX) {
    throw Timeout("the clock of " + device_->name() +
                  " could not be read: an empty stream was not " + "done after " +
                  std::to_string(patience_s_) +
                  " s, so other work keeps the device; start the trace when it is free");
  }
}

// ---- while it records ------------------------------------------------------------------------

DeviceTrace::Entry& DeviceTrace::take(const TraceEvent& what) {
  const size_t at = place_of(++last_);
  if (at >= ring_.size()) {
    ring_.resize(at + 1);
  }
  Entry& entry = ring_[at];
  entry.span = last_;
  entry.what = what;
  entry.is_moment = entry.ended = entry.waited = false;
  return entry;
}

DeviceTrace::Entry* DeviceTrace::find(Span span) {
  if (span <= last_before_) {
    return nullptr;  // none, or of a trace before this one
  }
  Entry& entry = ring_[place_of(span)];
  return entry.span == span ? &entry : nullptr;  // overwritten otherwise
}

// No thread takes the lock unless a trace is recorded.
template <class Note>
void DeviceTrace::while_recording(Device::Stream stream, Note note) {
  if (!recording() || device_->is_capturing(stream)) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (recording()) {
    note();
  }
}

void DeviceTrace::record(Device::Event& event, Device::Stream stream) {
  const DeviceGuard here(*device_);
  if (event == nullptr) {
    event = device_->make_timed_event();
  }
  device_->record(event, stream);
}

DeviceTrace::Span DeviceTrace::begin(const TraceEvent& what, Device::Stream stream) {
  Span span = 0;
  while_recording(stream, [&] {
    Entry& entry = take(what);
    record(entry.begins, stream);
    span = entry.span;
  });
  return span;
}

void DeviceTrace::end(Span span, Device::Stream stream) {
  while_recording(stream, [&] {
    if (Entry* entry = find(span)) {
      record(entry->ends, stream);
      entry->ended = true;
    }
  });
}

void DeviceTrace::moment(const TraceEvent& what, Device::Stream stream) {
  while_recording(stream, [&] {
    Entry& entry = take(what);
    record(entry.ends, stream);
    entry.is_moment = entry.ended = true;
  });
}

void DeviceTrace::waits(Span span, Device::Stream stream, bool by_host) {
  while_recording(stream, [&] {
    if (by_host && is_traced_) {
      return;
    }
    if (Entry* entry = find(span); entry != nullptr && !entry->waited) {
      record(entry->wait_begins, stream);
      entry->waited = true;
    }
  });
}

// ---- the end ---------------------------------------------------------------------------------

std::vector<TraceEvent> DeviceTrace::stop(uint64_t* dropped,
                                          const std::function<bool()>& gives_up) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_traced_ = false;
  recording_.store(is_watched_);
  const DeviceGuard here(*device_);
  const uint64_t taken = last_ - last_before_;
  *dropped = taken > capacity_ ? taken - capacity_ : 0;
  const auto happens = [&](Device::Event event) {
    while (!device_->has_happened(event)) {
      if (gives_up()) {
        return false;
      }
      std::this_thread::sleep_for(kNap);
    }
    return true;
  };
  std::vector<TraceEvent> found;
  for (Entry& entry : ring_) {
    if (entry.span == 0 || !entry.ended || !happens(entry.ends)) {
      continue;
    }
    TraceEvent event = entry.what;
    event.thread = 0;  // of no thread: the device's
    event.end_ns = time_of(entry.ends);
    event.begin_ns = entry.is_moment ? event.end_ns : time_of(entry.begins);
    found.push_back(event);
    if (entry.waited && happens(entry.wait_begins)) {
      event.kind = EventKind::exposed;
      event.begin_ns = time_of(entry.wait_begins);
      event.path = "";  // what ran says the operation's own
      event.schedule = 0;
      event.root = -1;
      event.world = 0;
      // A stream that comes when the result is there does not stand still.
      if (event.begin_ns < event.end_ns) {
        found.push_back(event);
      }
    }
  }
  return found;
}

// ---- while it is watched ---------------------------------------------------------------------

void DeviceTrace::watch(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_watched_ = on;
  if (on && !recording()) {
    begin_ring(kWatched);
  } else if (!is_traced_) {
    recording_.store(on);
  }
}

DeviceTrace::Span DeviceTrace::mark() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

const DeviceTrace::Entry* DeviceTrace::first_compute(Span after, Span until, bool ended) {
  for (Span span = after + 1; span <= until; ++span) {
    const Entry* entry = find(span);
    if (entry != nullptr && entry->what.kind == EventKind::compute && entry->ended >= ended) {
      return entry;
    }
  }
  return nullptr;
}

std::optional<DeviceTrace::Sums> DeviceTrace::sums(Span after, Span until) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const DeviceGuard here(*device_);
  const Entry* step = first_compute(after, until, true);  // others had no backward
  if (step == nullptr || after < last_before_) {
    return Sums{.is_lost = true};
  }
  const Entry* next = first_compute(until, last_, false);
  if (next == nullptr || !device_->has_happened(next->begins) ||
      !device_->has_happened(step->ends)) {
    return std::nullopt;
  }
  const auto at = [&](Device::Event event) { return device_->elapsed_ns(step->begins, event); };
  const int64_t computes_until = at(step->ends);
  Sums sums{.step = at(next->begins), .compute = computes_until};
  for (Span span = after + 1; span <= until; ++span) {
    const Entry* entry = find(span);
    if (entry == nullptr) {
      return Sums{.is_lost = true};
    }
    if (entry->what.kind != EventKind::operation || !entry->ended) {
      continue;
    }
    if (!device_->has_happened(entry->ends)) {
      return std::nullopt;
    }
    const int64_t end = at(entry->ends);
    sums.communication += std::max<int64_t>(end - at(entry->begins), 0);
    if (entry->waited) {
      const int64_t begin = at(entry->wait_begins);
      sums.exposed += std::max<int64_t>(end - begin, 0);
      sums.compute -= std::max<int64_t>(std::min(end, computes_until) - begin, 0);
    }
  }
  return sums;
}

}  // namespace dpcore
