// Vectors and element formats of one instruction set; included by reduce_kernels.inl.
//
// Almost everything is written in the compiler's generic vectors, so that one source gives
// SSE2, NEON, AVX2 and AVX-512; intrinsics appear only where the hardware has an instruction
// that the compiler cannot be led to.

#define DPCORE_INLINE inline __attribute__((always_inline))

constexpr size_t kVectorBytes = DPCORE_VECTOR_BYTES;

template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;

template <class V>
DPCORE_INLINE V load_vector(const char* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
DPCORE_INLINE void store_vector(char* p, V v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// To an aligned place, and not into this processor's caches; fence_past_caches() comes before the
// word that it is there. The thread sanitizer does not see such stores.
template <class V>
DPCORE_INLINE void store_past_caches(char* p, V v) {
#if defined(DPCORE_PORTABLE_KERNELS) || !defined(__x86_64__)
  store_vector(p, v);
#elif DPCORE_VECTOR_BYTES == 64
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif DPCORE_VECTOR_BYTES == 32
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#else
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#endif
}
DPCORE_INLINE void fence_past_caches() {
#if !defined(DPCORE_PORTABLE_KERNELS) && defined(__x86_64__)
  _mm_sfence();
#endif
}

// The first n < kVectorBytes bytes of a vector, from and to memory that ends there.
#if DPCORE_VECTOR_BYTES == 64
DPCORE_INLINE void load_part(char* vector, const char* src, size_t n) {
  _mm512_store_si512(vector, _mm512_maskz_loadu_epi8((1ull << n) - 1, src));
}
DPCORE_INLINE void store_part(char* dst, const char* vector, size_t n) {
  _mm512_mask_storeu_epi8(dst, (1ull << n) - 1, _mm512_load_si512(vector));
}
#else
template <size_t kSize>
DPCORE_INLINE void copy_piece(char*& dst, const char*& src, size_t n) {
  if ((n & kSize) == 0) {
    return;
  }
  __builtin_memcpy(dst, src, kSize);
  dst += kSize;
  src += kSize;
}
__attribute__((noinline)) void copy_part(char* dst, const char* src, size_t n) {
  copy_piece<16>(dst, src, n);
  copy_piece<8>(dst, src, n);
  copy_piece<4>(dst, src, n);
  copy_piece<2>(dst, src, n);
  copy_piece<1>(dst, src, n);
}
DPCORE_INLINE void load_part(char* vector, const char* src, size_t n) {
  store_vector(vector, Vec<uint8_t>{});
  copy_part(vector, src, n);
}
DPCORE_INLINE void store_part(char* dst, const char* vector, size_t n) {
  copy_part(dst, vector, n);
}
#endif

// Whether there may be a NaN in either vector: one comparison tells of both.
DPCORE_INLINE bool may_have_nan([[maybe_unused]] Vec<float> a, [[maybe_unused]] Vec<float> b) {
#if DPCORE_VECTOR_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
#elif DPCORE_VECTOR_BYTES == 32
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_ps(_mm_cmpunord_ps((__m128)a, (__m128)b)) != 0;
#else
  return true;
#endif
}
DPCORE_INLINE bool may_have_nan([[maybe_unused]] Vec<double> a, [[maybe_unused]] Vec<double> b) {
#if DPCORE_VECTOR_BYTES == 64
  return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_UNORD_Q) != 0;
#elif DPCORE_VECTOR_BYTES == 32
  return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)a, (__m256d)b, _CMP_UNORD_Q)) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_pd(_mm_cmpunord_pd((__m128d)a, (__m128d)b)) != 0;
#else
  return true;
#endif
}

// Which of two NaN payloads an addition keeps depends on how the compiler placed the
// operands, so that every NaN result becomes the one positive quiet NaN.
template <int kCount, class V>
DPCORE_INLINE void canonicalise_nans(V* acc) {
  bool found = false;
  for (int i = 0; i < kCount; i += 2) {
    found |= may_have_nan(acc[i], acc[i + 1 < kCount ? i + 1 : i]);
  }
  if (__builtin_expect(!found, true)) {
    return;
  }
  const V nan = V{} + static_cast<std::remove_cvref_t<decltype(acc[0][0])>>(__builtin_nan(""));
  for (int i = 0; i < kCount; ++i) {
    acc[i] = acc[i] == acc[i] ? acc[i] : nan;
  }
}

// Whether there may be a NaN or an Inf: one makes the sum of all of them NaN or Inf, whose
// difference from itself is NaN. Finite numbers whose sum is too large are an alarm for nothing.
template <int kCount, class V>
DPCORE_INLINE bool may_not_be_finite_by_sum(const V* acc) {
  V sums[kCount];
  for (int i = 0; i < kCount; ++i) {
    sums[i] = acc[i];
  }
  for (int width = kCount / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      sums[i] = sums[i] + sums[i + width];
    }
  }
  const V difference = sums[0] - sums[0];
  return may_have_nan(difference, difference);
}

// Whether there is a NaN, or something whose magnitude has at least the bits `limit`.
template <int kCount>
DPCORE_INLINE bool has_magnitude(const Vec<float>* acc, int32_t limit) {
  Vec<int32_t> largest{};
  for (int i = 0; i < kCount; ++i) {
    const auto magnitude = (Vec<int32_t>)acc[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const auto is_so = (Vec<float>)(largest >= limit);  // all bits, so a NaN, or none
  return may_have_nan(is_so, is_so);
}

// A format says how an element is stored, in which type it is accumulated, and how a vector
// of stored elements becomes kParts vectors of accumulators and back.

// f64, f32 and integers: accumulated as they are.
template <class T>
struct Plain {
  using Stored = T;
  using Acc = T;
  static constexpr int kParts = 1;

  static DPCORE_INLINE void load(const char* p, Vec<T>* part) { part[0] = load_vector<Vec<T>>(p); }
  static DPCORE_INLINE void store(char* p, const Vec<T>* part) { store_vector(p, part[0]); }
  template <int kCount>
  static DPCORE_INLINE bool may_not_be_finite(const Vec<T>* acc) {
    return may_not_be_finite_by_sum<kCount>(acc);
  }
};

// Anything but zero is true, and true is written as one.
struct Boolean : Plain<uint8_t> {
  static DPCORE_INLINE void load(const char* p, Vec<uint8_t>* part) {
    part[0] = (Vec<uint8_t>)(load_vector<Vec<uint8_t>>(p) != 0) & 1;
  }
};

// The upper half of a float32. A 32-bit word holds two: one part takes the lower ones, the
// other the upper ones, so that no element ever changes its place.
struct BFloat16 {
  using Stored = uint16_t;
  using Acc = float;
  static constexpr int kParts = 2;

  static DPCORE_INLINE void load(const char* p, Vec<float>* part) {
    const auto words = load_vector<Vec<uint32_t>>(p);
    part[0] = (Vec<float>)(words << 16);
    part[1] = (Vec<float>)(words & 0xffff0000u);
  }
  static DPCORE_INLINE void store(char* p, const Vec<float>* part) {
    store_vector(p, (rounded(part[0]) >> 16) | (rounded(part[1]) & 0xffff0000u));
  }
  template <int kCount>
  static DPCORE_INLINE bool may_not_be_finite(const Vec<float>* acc) {
    return has_magnitude<kCount>(acc, 0x7f7f8000);  // from here on the nearest is infinity
  }

 private:
  // To nearest even; the canonical NaN and infinity stay what they are.
  static DPCORE_INLINE Vec<uint32_t> rounded(Vec<float> v) {
    const auto bits = (Vec<uint32_t>)v;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

// IEEE half precision: conversion instructions where there are some, else arithmetic that
// gives the same bits, whatever the denormal mode of the thread.
struct Float16 {
  using Stored = uint16_t;
  using Acc = float;
  static constexpr int kParts = 2;

  template <int kCount>
  static DPCORE_INLINE bool may_not_be_finite(const Vec<float>* acc) {
    return has_magnitude<kCount>(acc, 0x477ff000);  // 65520, from which on the nearest is infinity
  }

#if DPCORE_VECTOR_BYTES >= 32
  static DPCORE_INLINE void load(const char* p, Vec<float>* part) {
    part[0] = widen(p);
    part[1] = widen(p + kVectorBytes / 2);
  }
  static DPCORE_INLINE void store(char* p, const Vec<float>* part) {
    constexpr int kNearest = 0;  // to nearest even, whatever the mode of the thread
#if DPCORE_VECTOR_BYTES == 64
    // Masked, with every lane on: gcc 12 warns of its own headers in the plain forms.
    const __m256i low = _mm512_maskz_cvtps_ph(0xffff, (__m512)part[0], kNearest);
    const __m256i high = _mm512_maskz_cvtps_ph(0xffff, (__m512)part[1], kNearest);
    store_vector(p, low);
    store_vector(p + 32, high);
#else
    store_vector(p, _mm256_cvtps_ph((__m256)part[0], kNearest));
    store_vector(p + 16, _mm256_cvtps_ph((__m256)part[1], kNearest));
#endif
  }

 private:
#if DPCORE_VECTOR_BYTES == 64
  static DPCORE_INLINE Vec<float> widen(const char* p) {
    return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(p));
  }
#else
  static DPCORE_INLINE Vec<float> widen(const char* p) {
    return (Vec<float>)_mm256_cvtph_ps(load_vector<__m128i>(p));
  }
#endif

#else
  // As in BFloat16: the lower and the upper halves of the words.
  static DPCORE_INLINE void load(const char* p, Vec<float>* part) {
    const auto words = load_vector<Vec<uint32_t>>(p);
    part[0] = widen((Vec<int32_t>)(words & 0xffffu));
    part[1] = widen((Vec<int32_t>)(words >> 16));
  }
  static DPCORE_INLINE void store(char* p, const Vec<float>* part) {
    store_vector(p, narrow(part[0]) | (narrow(part[1]) << 16));
  }

 private:
  using Bits = Vec<int32_t>;  // signed, since SSE2 compares no other integers

  static DPCORE_INLINE Vec<float> widen(Bits half) {
    const Bits sign = (half & 0x8000) << 16;
    const Bits magnitude = (half & 0x7fff) << 13;
    // Normal numbers: the exponent moves from bias 15 to bias 127.
    const Bits normal = magnitude + (112 << 23);
    // Infinity and NaN: all ones in the exponent, in both formats.
    const Bits finite_or_special = magnitude >= (0x1f << 23) ? magnitude | 0x7f800000 : normal;
    // Denormals: put the bits behind the one of 2^-14, then take 2^-14 away. Exact, and no
    // float32 denormal appears on the way.
    const Bits one = Bits{} + (113 << 23);
    const Bits denormal = (Bits)((Vec<float>)(magnitude + one) - (Vec<float>)one);
    return (Vec<float>)(sign | (magnitude < (1 << 23) ? denormal : finite_or_special));
  }

  static DPCORE_INLINE Bits narrow(Vec<float> v) {
    const Bits bits = (Bits)v;
    const Bits sign = (bits >> 16) & 0x8000;
    const Bits magnitude = bits & 0x7fffffff;
    // Normal results: rebias, round to nearest even at bit 13; a carry moves the exponent on.
    const Bits normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Denormal results: adding 0.5 leaves exactly the bits of half precision in the mantissa,
    // and the addition rounds them.
    const Bits half = Bits{} + (126 << 23);
    const Bits denormal = (Bits)((Vec<float>)magnitude + (Vec<float>)half) - half;
    const Bits finite = magnitude < (113 << 23) ? denormal : normal;
    // From 65520 on, the nearest is infinity.
    const Bits large = magnitude > 0x7f800000 ? Bits{} + 0x7e00 : Bits{} + 0x7c00;
    return sign | (magnitude >= 0x477ff000 ? large : finite);
  }
#endif
};
