// The look at a block of a reduction whose result is not finite, and counts over whole arrays. All
// of it goes by the bits: a number is not finite if its exponent is all ones, and Inf if the rest
// is zero.
#include "comm/reduce/not_finite.h"

#include <cstring>

#include "comm/reduce/reduce_dispatch.h"

namespace dpcore {
namespace {

template <class Bits>
struct Layout {
  Bits exponent;  // and Inf itself
  Bits sign = static_cast<Bits>(Bits{1} << (sizeof(Bits) * 8 - 1));

  static Bits at(const void* array, size_t i) {
    Bits bits;
    std::memcpy(&bits, static_cast<const char*>(array) + i * sizeof(Bits), sizeof bits);
    return bits;
  }
  bool is_not_finite(Bits bits) const { return (bits & exponent) == exponent; }
  bool is_inf(Bits bits) const { return magnitude(bits) == exponent; }
  bool is_nan(Bits bits) const { return magnitude(bits) > exponent; }
  Bits magnitude(Bits bits) const { return static_cast<Bits>(bits & ~sign); }
};

// Calls with the layout of a type's numbers, and how many of them an element has. Integers have no
// layout: nothing is called.
template <class Call>
void with_layout(DType dtype, Call call) {
  switch (dtype) {
    case DType::f64:
      return call(Layout<uint64_t>{0x7ff0'0000'0000'0000}, 1);
    case DType::c128:
      return call(Layout<uint64_t>{0x7ff0'0000'0000'0000}, 2);
    case DType::f32:
      return call(Layout<uint32_t>{0x7f80'0000}, 1);
    case DType::c64:
      return call(Layout<uint32_t>{0x7f80'0000}, 2);
    case DType::f16:
      return call(Layout<uint16_t>{0x7c00}, 1);
    case DType::bf16:
      return call(Layout<uint16_t>{0x7f80}, 1);
    default:
      return;
  }
}

}  // namespace

void look_for_not_finite(const ReduceJob& job, const char* results, size_t at, size_t bytes) {
  NotFinite& found = *job.check.found;
  if (found.rank >= 0) {
    return;
  }
  with_layout(job.dtype, [&]<class Bits>(Layout<Bits> layout, int) {
    for (size_t i = 0; i < bytes / sizeof(Bits); ++i) {
      if (!layout.is_not_finite(layout.at(results, i))) {
        continue;
      }
      const uint64_t element = job.check.first_element + (at / sizeof(Bits) + i) / job.width;
      bool has_cause = false;
      for (size_t input = 0; input < job.n_in; ++input) {
        if (!layout.is_not_finite(layout.at(job.in[input], at / sizeof(Bits) + i))) {
          continue;
        }
        has_cause = true;
        const int rank =
            job.check.ranks == nullptr ? static_cast<int>(input) : job.check.ranks[input];
        if (rank >= 0 && found.rank < 0) {
          found.rank = rank;
          found.overflowed = false;
          found.element = element;
        }
        if (rank >= 0 && rank < 64) {
          found.ranks |= uint64_t{1} << rank;
        }
      }
      if (!has_cause && !found.is_found()) {
        found.overflowed = true;
        found.element = element;
      }
    }
  });
}

NotFiniteCounts count_not_finite(DType dtype, const void* data, size_t count) {
  NotFiniteCounts counts;
  with_layout(dtype, [&](auto layout, int width) {
    for (size_t i = 0; i < count * width; ++i) {
      const auto bits = layout.at(data, i);
      counts.infs += layout.is_inf(bits) ? 1 : 0;
      counts.nans += layout.is_nan(bits) ? 1 : 0;
    }
  });
  return counts;
}

bool has_nan(DType dtype, const void* data, size_t count) {
  bool found = false;
  with_layout(dtype, [&]<class Bits>(Layout<Bits> layout, int width) {
    Bits any = 0;  // the difference is negative for a NaN alone: no comparison, and no branch
    for (size_t i = 0; i < count * width; ++i) {
      any |= static_cast<Bits>(layout.exponent - layout.magnitude(layout.at(data, i)));
    }
    found = (any & layout.sign) != 0;
  });
  return found;
}

}  // namespace dpcore
