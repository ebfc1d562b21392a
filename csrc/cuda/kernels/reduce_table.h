// Which instance of element::Reducer does what, for what runs it: the launcher of kernels and
// the host instantiate the same list.
//
// Internal to csrc/cuda. `Make` has a template <class Reducer> static Entry make(): a kernel of it,
// or a function.
#pragma once

#include "comm/reduce/reduce_lowering.h"
#include "cuda/kernels/reduce_share.h"

namespace dpcore {

template <class Entry, class Make>
class ReduceTable {
 public:
  constexpr ReduceTable() {
    using namespace element;
    set_real<Plain<double>>(DType::f64);
    set_real<Plain<float>>(DType::f32);
    set_real<Float16>(DType::f16);
    set_real<BFloat16>(DType::bf16);
    set<Plain<int64_t>, Any>(DType::i64);
    set<Plain<int32_t>, Any>(DType::i32);
    set<Plain<int16_t>, Any>(DType::i16);
    set<Plain<int8_t>, Any>(DType::i8);
    set<Plain<uint8_t>, Any>(DType::u8);
    set<Boolean, Any>(DType::boolean);
    set<Complex<float>, ComplexProd>(DType::c64);
    set<Complex<double>, ComplexProd>(DType::c128);
  }

  // For what lowered() has returned.
  Entry find(DType dtype, ReduceOp op) const {
    const Entry sum = sums_[static_cast<int>(dtype)];
    return op == ReduceOp::sum && sum != nullptr ? sum : others_[static_cast<int>(dtype)];
  }
  template <class Call>
  void each(Call call) const {
    for (const Entry& entry : sums_) {
      if (entry != nullptr) {
        call(entry);
      }
    }
    for (const Entry& entry : others_) {
      if (entry != nullptr) {
        call(entry);
      }
    }
  }

 private:
  static constexpr int kSumsAtOnce = 4;

  template <class Format, class Op>
  constexpr void set(DType dtype) {
    others_[static_cast<int>(dtype)] = Make::template make<element::Reducer<Format, Op, 1>>();
  }
  template <class Format>
  constexpr void set_real(DType dtype) {
    using namespace element;
    set<Format, Any>(dtype);
    sums_[static_cast<int>(dtype)] = Make::template make<Reducer<Format, Sum, kSumsAtOnce>>();
  }

  Entry sums_[kDTypeCount]{};
  Entry others_[kDTypeCount]{};
};

}  // namespace dpcore
