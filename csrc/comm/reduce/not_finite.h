// NaN and Inf in what ranks add up: which rank brought the first one, and where.
//
// A kernel that is asked to look tests each block of results once, in registers, and looks at the
// inputs of a block with a NaN or an Inf before it stores the block: an output may be an input.
// After the first one whose rank is known it looks no further, so a buffer full of them costs one
// look. Values; no memory is kept and none is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "comm/base/types.h"

namespace dpcore {

// What has been found; nothing at first.
struct NotFinite {
  int rank = -1;            // whose input it is, if it is one rank's
  bool overflowed = false;  // no rank's: a sum of finite numbers
  uint64_t element = 0;     // of the whole operation's buffer
  uint64_t ranks = 0;       // bit r: rank r, below 64, has one in the same few elements

  bool is_found() const { return rank >= 0 || overflowed; }
  // With what another rank has found in its part: the first one whose rank is known stays.
  void merge(const NotFinite& other) {
    const bool says_more =
        (other.rank >= 0) != (rank >= 0) ? other.rank >= 0 : other.element < element;
    if (other.is_found() && (!is_found() || says_more)) {
      *this = other;
    }
  }
};

// What reduce() is told where it shall look.
struct FiniteCheck {
  NotFinite* found = nullptr;      // null: do not look
  uint64_t first_element = 0;      // of the buffers, in that of the whole operation
  const int* ranks = nullptr;      // by input; null: input i is rank i's
  static constexpr int kSum = -1;  // in `ranks`: of several ranks, whose inputs were looked at
};

struct NotFiniteCounts {
  uint64_t nans = 0;
  uint64_t infs = 0;
};
// Of floating-point numbers; complex ones count once for each part.
NotFiniteCounts count_not_finite(DType dtype, const void* data, size_t count);
bool has_nan(DType dtype, const void* data, size_t count);

}  // namespace dpcore
