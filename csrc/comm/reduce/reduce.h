// N-ary reduction: out_k = post * (pre_0*in_0 op pre_1*in_1 op ... op pre_{N-1}*in_{N-1}), where
// integers have no factors and the result is divided by `divisor` instead, rounded toward zero.
//
// All inputs are read once and every output is written once, in one pass, whatever
// the number of ranks: this is what lets an all-reduce on mapped memory move 2*S
// bytes per rank. The order of the operands is the order of `in`, so the same inputs
// give the same bits on every rank, whatever thread or instruction set runs it.
//
// 16-bit floats are accumulated in float32 and rounded once at the end (to nearest,
// ties to even). Integers wrap. On booleans sum, max, bor mean "or"; prod, min, band
// mean "and"; bxor "xor". min and max propagate NaN, and of equal operands keep the first.
// Every NaN that comes out is the positive quiet one; a single input without factors keeps
// its bits.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "comm/base/types.h"
#include "comm/reduce/not_finite.h"

namespace dpcore {

struct ReduceSpec {
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;  // mean and premul_sum are sum here: scales say the rest
  double post = 1.0;            // multiplies the result; 1.0 costs nothing
  uint32_t divisor = 1;         // of integers: divides the result, rounded toward zero
  const double* pre = nullptr;  // one factor per input, or none
  bool takes_over = false;      // inputs are outputs, too, and other ranks wrote them last
  FiniteCheck check = {};       // of sums of floats that have no `pre` and several inputs
};

// What combines the contributions of `world` ranks with `op`: a mean is a sum that is divided by
// their number. What divides belongs to the last addition of all, and `pre` is left to the caller.
ReduceSpec reduction_over(int world, ReduceOp op, DType dtype);

// An output may be the same memory as an input (in place); partial overlap is not allowed.
// in.size() >= 1, out.size() >= 1. Pointers need only the alignment of the element type.
void reduce(const ReduceSpec& spec, std::span<const void* const> in, std::span<void* const> out,
            size_t count);

void copy_bytes(void* dst, const void* src, size_t n);

// Into memory that other ranks read next, and out of what another rank has written so.
void copy_to_peers(void* dst, const void* src, size_t n);
void copy_from_peer(void* dst, const void* src, size_t n);
// Whether copy_to_peers() may, on this processor: then a stage is faster than it is elsewhere.
bool bypasses_caches();

// The same for a source that another rank wrote last and this rank is going to write next: its
// lines come over once, with the right to write them.
void copy_taking_over(void* dst, const void* src, size_t n);

// "avx512", "avx2" or "portable": what reduce() uses on this processor. DPCORE_SIMD=... in the
// environment forces a lower one (read once). Results are bit-identical for all three.
std::string_view simd_level();

}  // namespace dpcore
