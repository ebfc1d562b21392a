// See step_trace.h.
#include "reducer/backward/step_trace.h"

#include "comm/base/clock.h"

namespace dpcore {

void StepTrace::note_moment(const char* name, EventKind kind, uint64_t number, uint64_t bytes,
                            int64_t now) {
  TraceRecorder* trace = recorder();
  if (trace == nullptr || !trace->recording()) {
    return;
  }
  TraceEvent event = event_of(name, kind, number);
  event.bytes = bytes;
  event.begin_ns = event.end_ns = now;
  if (!communicator_->add_moment(event)) {
    trace->add(event);
  }
}

TraceEvent StepTrace::event_of(const char* name, EventKind kind, uint64_t number) const {
  TraceEvent event;
  event.name = name;
  event.kind = kind;
  event.operation = number;
  event.schedule = traced_as_;  // only operations have one of their own
  return event;
}

void StepTrace::begin_compute(Compute& compute, const char* name, uint64_t iteration) {
  compute.begin_ns = now_ns();
  compute.span = communicator_->begin_span(event_of(name, EventKind::compute, iteration));
}

void StepTrace::end_compute(Compute& compute, const char* name, uint64_t iteration) {
  if (compute.begin_ns == 0) {
    return;
  }
  TraceRecorder* trace = recorder();
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

}  // namespace dpcore
