// Fewer kernels than pairs of type and operator: which kernel does the work of another.
#pragma once

#include "comm/base/types.h"

namespace dpcore {

struct LoweredReduction {
  DType dtype;
  ReduceOp op;
  size_t width = 1;  // elements of `dtype` in one of the original type
};

// For a valid pair. mean and premul_sum are sum: their factors come beside it.
inline LoweredReduction lowered(DType dtype, ReduceOp op) {
  if (op == ReduceOp::mean || op == ReduceOp::premul_sum) {
    op = ReduceOp::sum;
  }
  if (dtype == DType::boolean) {
    if (op == ReduceOp::sum || op == ReduceOp::max) {
      op = ReduceOp::bor;
    }
    if (op == ReduceOp::prod || op == ReduceOp::min) {
      op = ReduceOp::band;
    }
    return {dtype, op};
  }
  // Bits do not care about the width of the integer they are in.
  if (op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor) {
    return {DType::u8, op, size_of(dtype)};
  }
  // The sum of complex numbers is the sum of their parts, since the factors are real.
  if (op == ReduceOp::sum && dtype == DType::c64) {
    return {DType::f32, op, 2};
  }
  if (op == ReduceOp::sum && dtype == DType::c128) {
    return {DType::f64, op, 2};
  }
  return {dtype, op};
}

}  // namespace dpcore
