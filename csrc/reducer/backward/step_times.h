// When the parts of a step happened, sampled: what torch DDP calls its logging data.
//
// The moments are noted in every step, a clock read each; sums are kept of the first ten steps and
// of every hundredth after them. Belongs to the thread that runs forward and backward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reducer/bucket/bucket.h"

namespace dpcore {

struct StepTimes {
  // CLOCK_MONOTONIC, of the step that runs.
  int64_t forward_begin_ns = 0;
  int64_t forward_end_ns = 0;
  int64_t end_of_backward_ns = 0;

  struct Durations {
    int64_t forward = 0;
    int64_t backward = 0;       // from the end of forward to the last gradient
    int64_t communication = 0;  // from the first launch to the last arrival
    int64_t overlap = 0;        // of the two before
  };
  uint64_t every = 100;
  uint64_t samples = 0;
  uint64_t step = 0;  // that was sampled last, from 0 on
  size_t buckets_reduced = 0;
  int64_t forward_begin = 0, backward_begin = 0, backward_end = 0;
  int64_t communication_begin = 0, communication_end = 0;
  Durations last;
  Durations sum;

  void sample(uint64_t number, int64_t first_gradient_ns, const std::vector<Bucket>& buckets) {
    buckets_reduced = 0;
    for (const Bucket& bucket : buckets) {
      buckets_reduced += bucket.skipped ? 0 : 1;
    }
    if (buckets_reduced == 0 || (number >= 10 && number % every != 0)) {
      return;
    }
    communication_begin = INT64_MAX;
    communication_end = 0;
    for (const Bucket& bucket : buckets) {
      if (!bucket.skipped) {
        communication_begin = std::min(communication_begin, bucket.launched_ns);
        communication_end = std::max(communication_end, bucket.complete_ns);
      }
    }
    step = number;
    ++samples;
    forward_begin = forward_begin_ns;
    backward_begin = std::min(std::max(forward_end_ns, forward_begin_ns), first_gradient_ns);
    backward_end = end_of_backward_ns;
    last.forward = std::max<int64_t>(forward_end_ns - forward_begin_ns, 0);
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
