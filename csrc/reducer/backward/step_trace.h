// What the reducer tells whoever records: moments of gradients and buckets, and the spans in which
// a step computes. Belongs to the thread of forward and backward.
#pragma once

#include <cstdint>
#include <memory>

#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class StepTrace {
 public:
  // `traced_as`: the model's number in traces.
  StepTrace(std::shared_ptr<BucketCommunicator> communicator, uint64_t traced_as)
      : communicator_(std::move(communicator)), traced_as_(traced_as) {}

  // Whether anybody records.
  bool is_recorded() const {
    const TraceRecorder* trace = communicator_->trace();
    return trace != nullptr && trace->recording();
  }
  void note_moment(const char* name, EventKind kind, uint64_t number, uint64_t bytes, int64_t now);

  struct Compute {         // that is being recorded
    int64_t begin_ns = 0;  // 0: nothing is
    uint64_t span = 0;     // on a device
  };
  void begin_compute(Compute& compute, const char* name, uint64_t iteration);
  void end_compute(Compute& compute, const char* name, uint64_t iteration);

 private:
  TraceRecorder* recorder() { return communicator_->trace(); }
  TraceEvent event_of(const char* name, EventKind kind, uint64_t number) const;

  std::shared_ptr<BucketCommunicator> communicator_;
  uint64_t traced_as_;
};

}  // namespace dpcore
