// What steps cost this rank, as sums since the beginning: read between two steps, the differences
// are those of a step (dpcore/ddp/monitor.py).
//
// Computing goes from the begin of a forward until its backward has brought the last gradient, less
// what the thread has waited for communication meanwhile. A forward without a backward of its own
// (several of them before one backward, or no_sync()) counts until the last moment known of it.
//
// Belongs to the thread that runs forward and backward. What costs more than a clock read per
// bucket is only counted while somebody watches; after the first step nothing is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "comm/base/clock.h"

namespace dpcore {

class StepWatch {
 public:
  struct Sums {
    // Backwards whose gradients are averaged, also those of a rank without inputs: the same number
    // on all ranks.
    uint64_t backwards = 0;
    int64_t compute_ns = 0;
    int64_t waited_ns = 0;
    // While somebody watches:
    int64_t communication_ns = 0;  // at least one bucket on its way
    uint64_t bytes = 0;            // that ranks gave each other, of every leg
  };
  const Sums& sums() const { return sums_; }

  void watch(bool on) { is_watched_ = on; }
  bool is_watched() const { return is_watched_; }

  void forward_begins(int64_t now) {
    end_compute();
    computes_since_ns_ = last_ns_ = now;
    waited_before_ns_ = sums_.waited_ns;
  }
  bool computes() const { return computes_since_ns_ != 0; }
  // A moment until which the thread has certainly computed.
  void goes_on(int64_t now) { last_ns_ = now; }
  void backward_ends(int64_t now) {
    last_ns_ = now;
    end_compute();
    ++sums_.backwards;
  }
  // Of a rank without inputs.
  void shadow_ends() { ++sums_.backwards; }

  // A scope in which the thread waits for other ranks.
  class Wait {
   public:
    explicit Wait(StepWatch& watch) : watch_(watch), begin_ns_(now_ns()) {}
    ~Wait() { watch_.sums_.waited_ns += now_ns() - begin_ns_; }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    StepWatch& watch_;
    int64_t begin_ns_;
  };

  // Everything that was on its way in a step, one after the other, then the end of it.
  void add_way(int64_t begin_ns, int64_t end_ns, uint64_t bytes) {
    ways_.emplace_back(begin_ns, end_ns);
    sums_.bytes += bytes;
  }
  void step_ends() {
    std::sort(ways_.begin(), ways_.end());
    int64_t covered_until = INT64_MIN;
    for (const auto& [begin, end] : ways_) {
      sums_.communication_ns += std::max<int64_t>(end - std::max(begin, covered_until), 0);
      covered_until = std::max(covered_until, end);
    }
    ways_.clear();
  }

 private:
  void end_compute() {
    if (computes_since_ns_ != 0) {
      const int64_t waited = sums_.waited_ns - waited_before_ns_;
      sums_.compute_ns += std::max<int64_t>(last_ns_ - computes_since_ns_ - waited, 0);
      computes_since_ns_ = 0;
    }
  }

  Sums sums_;
  bool is_watched_ = false;
  int64_t computes_since_ns_ = 0;  // 0: it does not
  int64_t last_ns_ = 0;
  int64_t waited_before_ns_ = 0;
  std::vector<std::pair<int64_t, int64_t>> ways_;
};

}  // namespace dpcore
