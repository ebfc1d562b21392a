// The times of work on a device, on the clock of the host, for dpcore.trace.
//
// The host puts work into streams and continues; only the device knows when it runs. While a trace
// is recorded, a span of work has a timed event before and after it, and a stream that waits for
// the work has one where the wait begins: from there to the end of the work it is idle, which is
// called "exposed" on a device. A device's times have no origin, so one event whose time the host
// has seen (the zero) maps them to the host's clock. The clocks drift apart, so short traces are
// more exact.
//
// For dpcore.monitor it is watched instead: it records without an end, and sums() says what a step
// took once the device is done with it, without waiting for that. A trace that begins meanwhile
// takes the ring over; steps of then are lost.
//
// Memory: events are made as they are needed, up to the capacity, and used again; the oldest spans
// are overwritten and counted. Threads: any may add; a mutex, which no thread takes unless a
// trace is recorded. start() and stop() wait for the device, and for no longer than they are told
// to.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/group/trace.h"
#include "cuda/device/device.h"

namespace dpcore {

class DeviceTrace {
 public:
  // A span that is being recorded; 0: none.
  using Span = uint64_t;

  // `patience_s`: for work that takes microseconds, before start() throws Timeout.
  explicit DeviceTrace(std::shared_ptr<Device> device, double patience_s = 10.0)
      : device_(std::move(device)), patience_s_(patience_s) {}
  ~DeviceTrace();
  DeviceTrace(const DeviceTrace&) = delete;
  DeviceTrace& operator=(const DeviceTrace&) = delete;

  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  void start(size_t capacity);
  // What the device has done, in no order. Spans that have not ended when `gives_up` says so are
  // left out; those that the ring had no room for are counted.
  std::vector<TraceEvent> stop(uint64_t* dropped, const std::function<bool()>& gives_up);

  // What a step took, in nanoseconds. `step`: until the next one began to compute.
  struct Sums {
    bool is_lost = false;
    int64_t step = 0;
    int64_t compute = 0;  // without waits
    int64_t exposed = 0;
    int64_t communication = 0;
  };
  void watch(bool on);
  // Spans from here on are later than those before.
  Span mark();
  // Of the spans between two marks, of which the first to compute is the step's. Empty while the
  // device is not done with them. Never waits.
  std::optional<Sums> sums(Span after, Span until);

  // `what`: name, kind, number and bytes. All three do nothing while a graph is captured.
  Span begin(const TraceEvent& what, Device::Stream stream);
  void end(Span span, Device::Stream stream);
  void moment(const TraceEvent& what, Device::Stream stream);
  // From here on the stream waits for the end of the span. `by_host`: the thread itself does, in
  // place of a stream of its own; a trace has that from the host.
  void waits(Span span, Device::Stream stream, bool by_host = false);

 private:
  struct Entry {
    Span span = 0;
    TraceEvent what;
    bool is_moment = false;
    bool ended = false;
    bool waited = false;
    Device::Event begins = nullptr;
    Device::Event ends = nullptr;
    Device::Event wait_begins = nullptr;
  };

  template <class Note>
  void while_recording(Device::Stream stream, Note note);
  void begin_ring(size_t capacity);
  void find_zero();
  size_t place_of(Span span) const {
    return static_cast<size_t>(span - last_before_ - 1) % capacity_;
  }
  Entry& take(const TraceEvent& what);
  Entry* find(Span span);
  void record(Device::Event& event, Device::Stream stream);
  const Entry* first_compute(Span after, Span until, bool ended);
  int64_t time_of(Device::Event event) { return zero_ns_ + device_->elapsed_ns(zero_, event); }

  std::shared_ptr<Device> device_;
  double patience_s_;
  std::atomic<bool> recording_{false};
  bool is_traced_ = false;
  bool is_watched_ = false;
  std::mutex mutex_;
  std::vector<Entry> ring_;
  size_t capacity_ = 0;
  Span last_ = 0;  // numbers go on from trace to trace
  Span last_before_ = 0;
  Device::Event zero_ = nullptr;
  int64_t zero_ns_ = 0;
};

}  // namespace dpcore
