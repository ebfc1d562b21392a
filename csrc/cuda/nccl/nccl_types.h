// What NCCL calls our types and operators, where it has them. Pure functions.
#pragma once

#include <optional>

#include "comm/base/types.h"
#include "cuda/kernels/element.h"
#include "cuda/nccl/nccl_library.h"

namespace dpcore::nccl {

// An element as NCCL reduces it; complex numbers are sums of their parts.
struct Reduction {
  Type type = kInt8;
  size_t width = 1;  // of NCCL's elements in one of ours
  RedOp op = kSum;   // for premul_sum the one to be made is a sum
};

inline std::optional<Reduction> reduction_of(DType dtype, ReduceOp op) {
  Reduction result;
  switch (dtype) {
    case DType::f64:
    case DType::c128:
      result.type = kFloat64;
      break;
    case DType::f32:
    case DType::c64:
      result.type = kFloat32;
      break;
    case DType::f16:
      result.type = kFloat16;
      break;
    case DType::bf16:
      result.type = kBfloat16;
      break;
    case DType::i64:
      result.type = kInt64;
      break;
    case DType::i32:
      result.type = kInt32;
      break;
    case DType::i8:
      result.type = kInt8;
      break;
    case DType::u8:
    case DType::boolean:
      result.type = kUint8;
      break;
    case DType::i16:
      return std::nullopt;
  }
  const bool is_complex = dtype == DType::c64 || dtype == DType::c128;
  result.width = is_complex ? 2 : 1;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::premul_sum:
      result.op = dtype == DType::boolean ? kMax : kSum;  // of 0 and 1: or
      return result;
    case ReduceOp::mean:  // of integers too it divides the sum and rounds toward zero
      result.op = kAvg;
      return result;
    case ReduceOp::prod:
      if (is_complex) {
        return std::nullopt;
      }
      result.op = dtype == DType::boolean ? kMin : kProd;
      return result;
    case ReduceOp::min:
      result.op = kMin;
      return result;
    case ReduceOp::max:
      result.op = kMax;
      return result;
    case ReduceOp::bor:
    case ReduceOp::band:
      if (dtype != DType::boolean) {
        return std::nullopt;
      }
      result.op = op == ReduceOp::bor ? kMax : kMin;
      return result;
    case ReduceOp::bxor:
      return std::nullopt;
  }
  return std::nullopt;
}

// A factor as an element of the type, as the library wants to read it.
struct Scalar {
  alignas(8) unsigned char bytes[8] = {};
};

inline Scalar scalar_of(Type type, double value) {
  Scalar scalar;
  const auto put = [&scalar](auto x) { memcpy(scalar.bytes, &x, sizeof(x)); };
  if (type == kFloat64) {
    put(value);
  }
  if (type == kFloat32) {
    put(static_cast<float>(value));
  }
  if (type == kFloat16) {
    put(element::Float16::store(static_cast<float>(value)));
  }
  if (type == kBfloat16) {
    put(element::BFloat16::store(static_cast<float>(value)));
  }
  return scalar;
}

}  // namespace dpcore::nccl
