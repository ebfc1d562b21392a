// Reductions of the stand-in for NCCL: in rank order, in double precision or modulo 2^64, by code
// that the core does not use.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "cuda/kernels/element.h"
#include "cuda/nccl/nccl_library.h"

namespace fake {

namespace element = dpcore::element;
namespace nccl = dpcore::nccl;

inline size_t bytes_of(int type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

// Integers are exact in int64; floats in double.
template <class Use>
void with_type(int type, Use use) {
  switch (type) {
    case nccl::kInt8:
      return use(element::Plain<int8_t>{});
    case nccl::kUint8:
      return use(element::Plain<uint8_t>{});
    case nccl::kInt32:
      return use(element::Plain<int32_t>{});
    case nccl::kInt64:
      return use(element::Plain<int64_t>{});
    case nccl::kFloat16:
      return use(element::Float16{});
    case nccl::kFloat32:
      return use(element::Plain<float>{});
    case nccl::kFloat64:
      return use(element::Plain<double>{});
    case nccl::kBfloat16:
      return use(element::BFloat16{});
  }
}

struct Operand {
  const void* data;
  int op;
  double factor;
};

template <class Number>
Number combined(int op, Number a, Number b) {
  if (op == nccl::kProd) {
    return static_cast<Number>(a * b);
  }
  if (op == nccl::kMax) {
    return a < b ? b : a;
  }
  if (op == nccl::kMin) {
    return b < a ? b : a;
  }
  return static_cast<Number>(a + b);
}

inline void reduce_into(void* out, const std::vector<Operand>& operands, size_t count, int type) {
  with_type(type, [&]<class Format>(Format) {
    using Stored = typename Format::Stored;
    using Number = std::conditional_t<Format::kIsFloat, double, uint64_t>;
    const bool is_signed = std::is_signed_v<typename Format::Acc>;
    std::vector<Stored> result(count);
    for (size_t i = 0; i < count; ++i) {
      Number acc{};
      for (size_t k = 0; k < operands.size(); ++k) {
        const auto wide = Format::load(static_cast<const Stored*>(operands[k].data)[i]);
        Number x = static_cast<Number>(wide);
        if constexpr (Format::kIsFloat) {
          x *= operands[k].factor;
        }
        const bool compares = operands[k].op == nccl::kMax || operands[k].op == nccl::kMin;
        if (k == 0) {
          acc = x;
        } else if (!Format::kIsFloat && is_signed && compares) {
          acc = static_cast<Number>(
              combined(operands[k].op, static_cast<int64_t>(acc), static_cast<int64_t>(x)));
        } else {
          acc = combined(operands[k].op, acc, x);
        }
      }
      if (operands[0].op == nccl::kAvg) {
        if constexpr (Format::kIsFloat) {
          acc /= static_cast<double>(operands.size());
        } else if (is_signed) {  // wrapped to its type before it is divided, as NCCL does
          const auto sum = static_cast<int64_t>(static_cast<Stored>(acc));
          acc = static_cast<Number>(sum / static_cast<int64_t>(operands.size()));
        } else {
          acc = static_cast<Number>(static_cast<Stored>(acc)) / operands.size();
        }
      }
      result[i] = Format::store(static_cast<typename Format::Acc>(acc));
    }
    std::memcpy(out, result.data(), count * sizeof(Stored));
  });
}

}  // namespace fake
