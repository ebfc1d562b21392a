// Figures from the records of steps: sums for the monitor, and samples for torch's logger.
//
// Belongs to the thread that runs forward and backward; after the first step nothing is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "reducer/backward/step_record.h"

namespace dpcore {

// What steps cost this rank since the beginning: read between two steps, the differences are those
// of a step (dpcore/step_figures/monitor.py).
class StepSums {
 public:
  // Backwards whose gradients are averaged, also those of a rank without inputs: the same number on
  // all ranks.
  uint64_t backwards = 0;
  int64_t compute_ns = 0;
  // While is_watched, since these cost more than a clock read per bucket:
  bool is_watched = false;
  int64_t communication_ns = 0;  // at least one bucket in flight
  uint64_t bytes = 0;            // that ranks gave each other, in every phase

  void add_compute(StepRecord& record) {
    if (record.computes_since_ns != 0) {
      const int64_t waited = record.waited_ns - record.waited_before_ns;
      compute_ns +=
          std::max<int64_t>(record.computes_until_ns - record.computes_since_ns - waited, 0);
      record.computes_since_ns = 0;
    }
  }
  void add_communication(const StepRecord& record) {
    if (!is_watched) {
      return;
    }
    for (const StepRecord::OfBucket& bucket : record.buckets) {
      if (bucket.is_sent) {
        in_flight_.emplace_back(bucket.launched_ns, bucket.over_ns);
        bytes += bucket.sent_bytes;
      }
      if (bucket.gather_launched_ns != 0) {
        in_flight_.emplace_back(bucket.gather_launched_ns, bucket.gather_over_ns);
        bytes += bucket.gathered_bytes;
      }
    }
    std::sort(in_flight_.begin(), in_flight_.end());
    int64_t covered_until = INT64_MIN;
    for (const auto& [begin, end] : in_flight_) {
      communication_ns += std::max<int64_t>(end - std::max(begin, covered_until), 0);
      covered_until = std::max(covered_until, end);
    }
    in_flight_.clear();
  }

 private:
  std::vector<std::pair<int64_t, int64_t>> in_flight_;
};

// What torch DDP calls its logging data: the first ten steps, and every hundredth after them.
struct StepSamples {
  struct Durations {
    int64_t forward = 0;
    int64_t backward = 0;       // from the end of forward to the last gradient
    int64_t communication = 0;  // from the first launch to the last arrival
    int64_t overlap = 0;        // of the two before
  };
  uint64_t every = 100;
  uint64_t count = 0;
  uint64_t step = 0;  // that was sampled last, from 0 on
  size_t buckets_reduced = 0;
  int64_t forward_begin = 0, backward_begin = 0, backward_end = 0;
  int64_t communication_begin = 0, communication_end = 0;
  Durations last;
  Durations sum;

  void add(uint64_t number, const StepRecord& record) {
    const auto is_sent = [](const StepRecord::OfBucket& bucket) { return bucket.is_sent; };
    buckets_reduced = std::count_if(record.buckets.begin(), record.buckets.end(), is_sent);
    if (buckets_reduced == 0 || (number >= 10 && number % every != 0)) {
      return;
    }
    communication_begin = INT64_MAX;
    communication_end = 0;
    for (const StepRecord::OfBucket& bucket : record.buckets) {
      if (bucket.is_sent) {
        communication_begin = std::min(communication_begin, bucket.launched_ns);
        communication_end = std::max(communication_end, bucket.complete_ns);
      }
    }
    step = number;
    ++count;
    forward_begin = record.forward_begin_ns;
    backward_begin = std::min(std::max(record.forward_end_ns, record.forward_begin_ns),
                              record.first_gradient_ns);
    backward_end = record.backward_end_ns;
    last.forward = std::max<int64_t>(record.forward_end_ns - record.forward_begin_ns, 0);
    last.backward = std::max<int64_t>(backward_end - backward_begin, 0);
    last.communication = std::max<int64_t>(communication_end - communication_begin, 0);
    const int64_t both = std::min(backward_end, communication_end) - communication_begin;
    last.overlap = std::clamp<int64_t>(both, 0, std::min(last.backward, last.communication));
    sum.forward += last.forward;
    sum.backward += last.backward;
    sum.communication += last.communication;
    sum.overlap += last.overlap;
  }
};

}  // namespace dpcore
