// A step's record in traces: the times of gradients and buckets, and the spans in which a step
// computes; in torch's profiler, the time in flight of each bucket.
//
// Events are added as the reducer records them, not at the end of the step: on a device a moment is
// a position in the stream, and a run that ends within a step keeps its events up to there.
// Belongs to the thread of forward and backward.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <string>

#include "comm/base/clock.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class StepTrace {
 public:
  // `traced_as`: the model's number in traces; `profiled_as`: the name of its buckets on their way
  // in torch's profiler, or empty.
  StepTrace(std::shared_ptr<BucketCommunicator> communicator, uint64_t traced_as,
            std::string profiled_as)
      : communicator_(std::move(communicator)),
        traced_as_(traced_as),
        profiled_as_(std::move(profiled_as)) {}

  // Whether anything records.
  bool is_recorded() const {
    const TraceRecorder* trace = communicator_->trace();
    return trace != nullptr && trace->recording();
  }
  // Of a bucket, until it is complete. Null while the profiler is off, which costs one check.
  std::unique_ptr<at::RecordFunction> profiled_bucket() const {
    if (profiled_as_.empty()) {
      return nullptr;
    }
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (!callbacks) {
      return nullptr;
    }
    auto record = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    record->_setAsync();
    record->before(profiled_as_);
    return record;
  }
  void add_moment(const char* name, EventKind kind, uint64_t number, uint64_t bytes, int64_t now) {
    if (!is_recorded()) {
      return;
    }
    TraceEvent event = event_of(name, kind, number);
    event.bytes = bytes;
    event.begin_ns = event.end_ns = now;
    if (!communicator_->add_moment(event)) {
      communicator_->trace()->add(event);
    }
  }

  struct Compute {         // that is being recorded
    int64_t begin_ns = 0;  // 0: nothing is
    uint64_t span = 0;     // on a device
  };
  void begin_compute(Compute& compute, const char* name, uint64_t iteration) {
    compute.begin_ns = now_ns();
    compute.span = communicator_->begin_span(event_of(name, EventKind::compute, iteration));
  }
  void end_compute(Compute& compute, const char* name, uint64_t iteration) {
    if (compute.begin_ns == 0) {
      return;
    }
    TraceRecorder* trace = communicator_->trace();
    if (compute.span != 0) {
      communicator_->end_span(compute.span);
    } else if (trace != nullptr) {
      TraceEvent event = event_of(name, EventKind::compute, iteration);
      event.begin_ns = compute.begin_ns;
      event.end_ns = now_ns();
      trace->add(event);
    }
    compute = {};
  }

 private:
  TraceEvent event_of(const char* name, EventKind kind, uint64_t number) const {
    TraceEvent event;
    event.name = name;
    event.kind = kind;
    event.operation = number;
    event.schedule = traced_as_;  // only operations have one of their own
    return event;
  }

  std::shared_ptr<BucketCommunicator> communicator_;
  uint64_t traced_as_;
  std::string profiled_as_;
};

}  // namespace dpcore
