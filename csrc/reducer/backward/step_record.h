// The times of a step's parts: one record, written by the reducer. Its readers are the sums and
// samples (step_figures.h), traces (step_trace.h), the report of buckets, and the code that
// rebuilds buckets by measured times.
//
// Times are of CLOCK_MONOTONIC and of the current step; the next step overwrites them one by one.
// Memory: an entry per bucket and per gradient, made with the buckets. Belongs to the thread that
// runs forward and backward, so no lock is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/base/clock.h"

namespace dpcore {

struct StepRecord {
  // 0: that moment has not come yet.
  struct OfBucket {
    int64_t ready_ns = 0;  // all its gradients are there
    int64_t launched_ns = 0;
    int64_t over_ns = 0;  // the first phase: before complete_ns, where nothing waited then
    int64_t complete_ns = 0;
    int64_t gather_launched_ns = 0;  // of a phase after the first
    int64_t gather_over_ns = 0;
    uint64_t sent_bytes = 0;      // that this rank gave to the first phase
    uint64_t gathered_bytes = 0;  // to the gather
    bool is_sent = false;         // rather than skipped

    void begin() { gather_launched_ns = 0, is_sent = false; }
  };
  std::vector<OfBucket> buckets;

  int64_t forward_begin_ns = 0;
  int64_t forward_end_ns = 0;
  int64_t first_gradient_ns = 0;
  int64_t backward_end_ns = 0;
  int64_t over_ns = 0;
  // Gradients as they arrived; their moments until buckets are rebuilt.
  std::vector<size_t> arrival;
  std::vector<int64_t> arrival_ns;

  // The thread computes from the begin of a forward until its backward has brought the last
  // gradient, less what it waits for other ranks meanwhile. A forward without a backward of its own
  // (several of them before one backward, or no_sync()) counts until the last moment known of it.
  int64_t computes_since_ns = 0;  // 0: it does not
  int64_t computes_until_ns = 0;
  int64_t waited_before_ns = 0;
  int64_t waited_ns = 0;  // since the beginning

  void compute_begins(int64_t now) {
    computes_since_ns = computes_until_ns = now;
    waited_before_ns = waited_ns;
  }

  // A scope in which the thread waits for other ranks.
  class Wait {
   public:
    explicit Wait(StepRecord& record) : record_(record), begin_ns_(now_ns()) {}
    ~Wait() { record_.waited_ns += now_ns() - begin_ns_; }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    StepRecord& record_;
    int64_t begin_ns_;
  };
};

}  // namespace dpcore
