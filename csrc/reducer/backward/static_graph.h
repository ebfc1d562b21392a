// How often each gradient arrives per backward, recorded once for graphs that never change.
//
// A parameter may be used by several runs of autograd within one backward (re-entrant or repeated
// activation checkpointing): its gradient is complete after the last of them. The first iteration
// counts; it cannot know which run is the last, so it sends all buckets at its end. Later
// iterations send a bucket as soon as its gradients have arrived that often. Nothing is allocated
// after the first iteration. Belongs to the thread that runs backward.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/base/clock.h"

namespace dpcore {

class StaticGraph {
 public:
  enum class Arrival : uint8_t { recorded, more_to_come, complete, unexpected };

  struct Recorded {
    size_t gradient;
    int64_t ns;
  };

  explicit StaticGraph(size_t gradients) : expected_(gradients), left_(gradients) {}

  bool is_recording() const { return recording_; }
  bool is_used(size_t i) const { return expected_[i] > 0; }

  Arrival arrives(size_t i) {
    if (recording_) {
      ++expected_[i];
      order_.push_back({i, now_ns()});
      return Arrival::recorded;
    }
    if (left_[i] == 0) {
      return Arrival::unexpected;
    }
    return --left_[i] > 0 ? Arrival::more_to_come : Arrival::complete;
  }

  // Ends recording. Gradients by their last arrival.
  std::vector<Recorded> finish_recording() {
    recording_ = false;
    std::vector<Recorded> last_first;
    std::vector<bool> seen(expected_.size());
    for (auto recorded = order_.rbegin(); recorded != order_.rend(); ++recorded) {
      if (!seen[recorded->gradient]) {
        seen[recorded->gradient] = true;
        last_first.push_back(*recorded);
      }
    }
    order_ = {};
    std::reverse(last_first.begin(), last_first.end());
    return last_first;
  }

  void begin_iteration() {
    left_ = expected_;
    if (recording_) {
      std::fill(expected_.begin(), expected_.end(), 0);
      order_.clear();
    }
  }

 private:
  bool recording_ = true;
  std::vector<uint32_t> expected_;
  std::vector<uint32_t> left_;
  std::vector<Recorded> order_;
};

}  // namespace dpcore
