// NCCL's values for our types and operators, if it has them. Pure functions.
#pragma once

#include <array>
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

// By DType. Booleans are bytes, complex numbers their parts, and there are no integers of 16 bits.
inline constexpr std::array<std::optional<Type>, kDTypeCount> kTypes = {
    kFloat64,     kFloat32, kFloat16, kBfloat16, kInt64,   kInt32,
    std::nullopt, kInt8,    kUint8,   kUint8,    kFloat32, kFloat64};

// Booleans are 0 and 1: their sum is or, their product is and.
inline std::optional<Reduction> reduction_of(DType dtype, ReduceOp op) {
  const std::optional<Type> type = kTypes[static_cast<size_t>(dtype)];
  const bool is_complex = dtype == DType::c64 || dtype == DType::c128;
  const bool is_boolean = dtype == DType::boolean;
  const auto with = [&](RedOp builtin) -> std::optional<Reduction> {
    return type ? std::optional(Reduction{*type, is_complex ? size_t{2} : size_t{1}, builtin})
                : std::nullopt;
  };
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::premul_sum:
      return with(is_boolean ? kMax : kSum);
    case ReduceOp::mean:  // of integers too it divides the sum and rounds toward zero
      return with(kAvg);
    case ReduceOp::prod:
      return is_complex ? std::nullopt : with(is_boolean ? kMin : kProd);
    case ReduceOp::min:
      return with(kMin);
    case ReduceOp::max:
      return with(kMax);
    case ReduceOp::bor:
      return is_boolean ? with(kMax) : std::nullopt;
    case ReduceOp::band:
      return is_boolean ? with(kMin) : std::nullopt;
    case ReduceOp::bxor:
      break;
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
