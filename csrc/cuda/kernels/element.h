// Elements as a processor computes with them: how each type is stored, in which type it is
// accumulated, and the operators. Every function here compiles for the GPU and for the host, and
// gives the same bits on both as csrc/comm/reduce gives: this is what lets an ordered all-reduce
// on GPUs equal the one on CPUs, and lets the arithmetic be tested where there is no GPU.
//
// On the GPU the conversions of 16-bit floats are one instruction each; on the host they are
// arithmetic on the bits. Multiplication and addition are never fused (the compiler is told so
// for both), denormals are kept, and every NaN that is written is the positive quiet one.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "comm/base/types.h"

#if defined(__CUDACC__)
#define DPCORE_BOTH __host__ __device__ __forceinline__
#else
#define DPCORE_BOTH inline
#endif

// Arrays that are to stay in registers need their loops unrolled; the host's compiler decides.
#if defined(__CUDA_ARCH__)
#define DPCORE_UNROLL _Pragma("unroll")
#else
#define DPCORE_UNROLL
#endif

namespace dpcore::element {

template <class To, class From>
DPCORE_BOTH To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

// ---- formats: Stored is what lies in memory, Acc what is computed with ------------------------

// f64, f32 and integers.
template <class T>
struct Plain {
  using Stored = T;
  using Acc = T;
  static constexpr bool kIsFloat = std::is_floating_point_v<T>;

  static DPCORE_BOTH Acc load(Stored x) { return x; }
  static DPCORE_BOTH Stored store(Acc x) { return x; }
};

// Anything but zero is true, and true is written as one.
struct Boolean : Plain<uint8_t> {
  static DPCORE_BOTH uint8_t load(uint8_t x) { return x != 0 ? 1 : 0; }
};

// The upper half of a float32, rounded to nearest even.
struct BFloat16 {
  using Stored = uint16_t;
  using Acc = float;
  static constexpr bool kIsFloat = true;

  static DPCORE_BOTH float load(uint16_t x) {
    return bits_as<float>(static_cast<uint32_t>(x) << 16);
  }
  static DPCORE_BOTH uint16_t store(float x) {
    const auto bits = bits_as<uint32_t>(x);
    if (x != x) {
      return 0x7fc0;
    }
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

// IEEE half precision, rounded to nearest even.
struct Float16 {
  using Stored = uint16_t;
  using Acc = float;
  static constexpr bool kIsFloat = true;

  static DPCORE_BOTH float load(uint16_t x) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
#else
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
    if (magnitude >= 0x1fu << 23) {
      return bits_as<float>(sign | magnitude | 0x7f800000u);
    }
    if (magnitude >= 1u << 23) {
      return bits_as<float>(sign | (magnitude + (112u << 23)));
    }
    // Denormal: put the bits behind the one of 2^-14, then take 2^-14 away. Exact.
    const uint32_t one = 113u << 23;
    const float rest = bits_as<float>(magnitude + one) - bits_as<float>(one);
    return bits_as<float>(sign | bits_as<uint32_t>(rest));
#endif
  }
  static DPCORE_BOTH uint16_t store(float x) {
    if (x != x) {
      return 0x7e00;
    }
#if defined(__CUDA_ARCH__)
    uint16_t narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
    return narrow;
#else
    const auto bits = bits_as<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x477ff000u) {
      return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
    }
    if (magnitude >= 113u << 23) {
      // Move the exponent, round to nearest even at bit 13; a carry moves the exponent on.
      const uint32_t rounded = magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u);
      return static_cast<uint16_t>(sign | (rounded >> 13));
    }
    // Adding 0.5 leaves exactly the bits of half precision in the mantissa, and rounds them.
    const uint32_t half = 126u << 23;
    const float rounded = bits_as<float>(magnitude) + bits_as<float>(half);
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(rounded) - half));
#endif
  }
};

// (real, imaginary), for products; sums are those of the parts.
template <class T>
struct Pair {
  T re, im;
};
template <class T>
struct Complex {
  using Stored = Pair<T>;
  using Acc = Pair<T>;
  static constexpr bool kIsFloat = true;

  static DPCORE_BOTH Acc load(Stored x) { return x; }
  static DPCORE_BOTH Stored store(Acc x) { return x; }
};

// ---- factors, divisors and NaNs --------------------------------------------------------------

template <class T>
DPCORE_BOTH T scaled(T x, double factor) {
  return x * static_cast<T>(factor);
}
template <class T>
DPCORE_BOTH Pair<T> scaled(Pair<T> x, double factor) {
  return {scaled(x.re, factor), scaled(x.im, factor)};
}

// Rounded toward zero.
template <class T>
DPCORE_BOTH T divided(T x, uint32_t divisor) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  return static_cast<T>(static_cast<Wide>(x) / static_cast<Wide>(divisor));
}

DPCORE_BOTH float canonical(float x) { return x != x ? bits_as<float>(0x7fc00000u) : x; }
DPCORE_BOTH double canonical(double x) {
  return x != x ? bits_as<double>(uint64_t{0x7ff8000000000000}) : x;
}
template <class T>
DPCORE_BOTH Pair<T> canonical(Pair<T> x) {
  return {canonical(x.re), canonical(x.im)};
}

// ---- operators: acc op x ---------------------------------------------------------------------

// Small integers are promoted to int, where a product could overflow: unsigned it wraps.
template <class T>
using Wide = std::conditional_t<std::is_integral_v<T>,
                                std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>, T>;

struct Sum {
  template <class T>
  static DPCORE_BOTH T apply(ReduceOp, T acc, T x) {
    return static_cast<T>(static_cast<Wide<T>>(acc) + static_cast<Wide<T>>(x));
  }
};

// (a + bi)(c + di) = (ac - bd) + (ad + bc)i
struct ComplexProd {
  template <class T>
  static DPCORE_BOTH Pair<T> apply(ReduceOp, Pair<T> acc, Pair<T> x) {
    return {acc.re * x.re - acc.im * x.im, acc.re * x.im + acc.im * x.re};
  }
};

// Whatever the job says. Sums have instances of their own, since they are what is waited for; one
// for each of the others would make the compiler work for minutes.
struct Any {
  template <class T>
  static DPCORE_BOTH T apply(ReduceOp op, T acc, T x) {
    if constexpr (std::is_integral_v<T>) {
      if (op == ReduceOp::band) {
        return acc & x;
      }
      if (op == ReduceOp::bor) {
        return acc | x;
      }
      if (op == ReduceOp::bxor) {
        return acc ^ x;
      }
    }
    // Of equal operands (+0 and -0 too) the first stays; a NaN replaces, and is never replaced.
    if (op == ReduceOp::min) {
      return x < acc || x != x ? x : acc;
    }
    if (op == ReduceOp::max) {
      return x > acc || x != x ? x : acc;
    }
    if (op == ReduceOp::sum) {
      return Sum::apply(op, acc, x);
    }
    return static_cast<T>(static_cast<Wide<T>>(acc) * static_cast<Wide<T>>(x));
  }
};

}  // namespace dpcore::element
