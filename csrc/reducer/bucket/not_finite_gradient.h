// The first gradient of a step in which a sum has met NaN or Inf: whose it was, and how many its
// average has now.
//
// A record belongs to the step that found it, so that a step which the program leaves out (as a
// scaler of gradients does) is not held against the next one. A gradient that was not zeroed brings
// the same numbers again, then on every rank: its first record stays.
//
// Memory: one record. Threads: those of the reducer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/reduce/not_finite.h"
#include "reducer/bucket/bucket.h"

namespace dpcore {

struct NotFiniteGradient {
  size_t gradient = 0;
  int rank = -1;            // -1: no rank's, the sum of finite numbers overflowed
  uint64_t ranks = 0;       // as NotFinite has them
  uint64_t element = 0;     // the first one, in the memory of the parameter
  NotFiniteCounts counts;   // in the average, or in this rank's part of it
  uint64_t elements = 0;    // of these; 0 where this rank has no average of the first one
  uint64_t step = 0;        // as messages count
  std::string narrowed_to;  // the type that travels, if it is not the gradient's
};

class FirstNotFinite {
 public:
  // Where averages are: everywhere, or in one of `count` parts.
  struct Part {
    int number = 0;
    int count = 1;
  };
  // What an operation has found that carried these buckets.
  void note(const NotFinite& found, std::span<const Bucket> together,
            const std::vector<Gradient>& gradients, uint64_t step, Part part);
  // Of the last step, after so many of them; or null.
  const NotFiniteGradient* of(uint64_t completed) const {
    return first_ && last_step_ >= completed ? &*first_ : nullptr;
  }

 private:
  std::optional<NotFiniteGradient> first_;
  uint64_t last_step_ = 0;  // in which it was seen
};

}  // namespace dpcore
