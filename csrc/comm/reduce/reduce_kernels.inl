// The reduction kernels, written once. reduce_portable.cpp, reduce_avx2.cpp and
// reduce_avx512.cpp include this text after defining DPCORE_LEVEL (a namespace) and
// DPCORE_VECTOR_BYTES, each under its own target.
//
// A kernel walks over the elements in blocks of a few vectors. For each block it reads all
// inputs in order into accumulators that stay in registers, scales, and writes all outputs:
// every byte is read once and written once, for any number of inputs and outputs. An
// element's result depends on its operands only, never on where it lies in the array: lanes
// do not mix, and no multiplication is fused with an addition.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3", "no-tree-vectorize", "fp-contract=off")
#endif

namespace dpcore {
namespace DPCORE_LEVEL {
namespace {

#include "comm/reduce/reduce_vector.inl"

struct Sum {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    return acc + x;
  }
};

struct Prod {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    return acc * x;
  }
};

// Of equal operands (+0 and -0 too) the first stays; a NaN replaces, and is never replaced.
struct Min {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    return (x < acc) | (x != x) ? x : acc;
  }
};

struct Max {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    return (x > acc) | (x != x) ? x : acc;
  }
};

struct BitAnd {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    return acc & x;
  }
};

struct BitOr {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    return acc | x;
  }
};

struct BitXor {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    return acc ^ x;
  }
};

// Pairs (real, imaginary): (a + bi)(c + di) = (ac - bd) + (ad + bc)i.
struct ComplexProd {
  template <class V>
  static DPCORE_INLINE V apply(V acc, V x) {
    using T = std::remove_cvref_t<decltype(acc[0])>;
    using Index = decltype(acc == acc);
    constexpr int kLanes = sizeof(V) / sizeof(T);
    Index real{}, imag{}, swap{};
    V sign{};
    for (int i = 0; i < kLanes; ++i) {
      real[i] = i & ~1;
      imag[i] = i | 1;
      swap[i] = i ^ 1;
      sign[i] = i & 1 ? T(1) : T(-1);
    }
    const V cross = __builtin_shuffle(acc, imag) * __builtin_shuffle(x, swap);
    return __builtin_shuffle(acc, real) * x + cross * sign;
  }
};

// How the main loop treats the memory hierarchy.
enum class Memory { cached, prefetched, taken_over };

// How far ahead of the loads. The hardware's own prefetcher starts anew in every 4 KiB page
// and takes a few lines to see the stream; asking 2 KiB ahead hides that start. Measured with
// two inputs reduced in place, against no prefetching: from 1 MiB (beyond the L2 cache) to
// 64 MiB 5 to 20% faster, f16 and bf16 most; 512 bytes ahead gives half of it; within the L2
// cache it costs 3 to 6%.
constexpr size_t kAhead = 2048;
constexpr size_t kCopyAhead = 1024;

// Arrays of an arena lie at the same offset of their pages, which is the same set of the L1
// cache: with more inputs the lines asked for push each other out (16 inputs, 1 MiB in all:
// 36 GB/s without, 26 with).
constexpr size_t kPrefetchedInputs = 4;
constexpr size_t kLineBytes = 64;

// From here on it pays to align and prefetch; lines of another processor are far away.
constexpr size_t kLarge = 32 << 10;
constexpr size_t kLargeTakenOver = 4 << 10;

// kGroup: stored elements that belong together (2 for the parts of a complex product). kChecked:
// blocks of results that are not finite are looked at.
template <class Format, class Op, bool kScaled, int kGroup = 1, bool kChecked = false>
struct Kernel {
  using Stored = typename Format::Stored;
  using Acc = typename Format::Acc;
  using V = Vec<Acc>;
  static constexpr int kParts = Format::kParts;
  static constexpr int kVectors = (kVectorBytes == 16 ? 4 : 8) / kParts;
  static constexpr size_t kBlock = kVectors * kVectorBytes;

  template <int kCount>
  static DPCORE_INLINE void load(const ReduceJob& job, size_t input, const char* p, V* x) {
    for (int v = 0; v < kCount; ++v) {
      Format::load(p + v * kVectorBytes, x + v * kParts);
    }
    if constexpr (kScaled) {
      const Acc factor = static_cast<Acc>(job.pre[input]);
      for (int v = 0; v < kCount * kParts; ++v) {
        x[v] = x[v] * factor;
      }
    }
  }

  template <int kCount>
  static DPCORE_INLINE void combine(V* acc, const V* x) {
    for (int v = 0; v < kCount * kParts; ++v) {
      acc[v] = Op::apply(acc[v], x[v]);
    }
  }

  // The results of `bytes` bytes at the offset `at`.
  template <int kCount>
  static DPCORE_INLINE void finish([[maybe_unused]] const ReduceJob& job, V* acc,
                                   [[maybe_unused]] Acc post, [[maybe_unused]] size_t at,
                                   [[maybe_unused]] size_t bytes) {
    constexpr int kAll = kCount * kParts;
    if constexpr (std::is_floating_point_v<Acc>) {
      for (int v = 0; v < kAll; ++v) {
        acc[v] = acc[v] * post;
      }
      if constexpr (!kChecked) {
        canonicalise_nans<kAll>(acc);
      } else if (__builtin_expect(Format::template may_not_be_finite<kAll>(acc), false)) {
        canonicalise_nans<kAll>(acc);
        V results[kAll];  // so that acc itself stays in registers
        for (int v = 0; v < kAll; ++v) {
          results[v] = acc[v];
        }
        tell<kCount>(job, results, at, bytes);
      }
    }
  }

  template <int kCount>
  [[gnu::noinline, gnu::cold]] static void tell(const ReduceJob& job, const V* acc, size_t at,
                                                size_t bytes) {
    alignas(kVectorBytes) char results[kCount * kVectorBytes];
    for (int v = 0; v < kCount; ++v) {
      Format::store(results + v * kVectorBytes, acc + v * kParts);
    }
    look_for_not_finite(job, results, at, bytes);
  }

  template <int kCount, Memory kMemory>
  static DPCORE_INLINE const char* input(const ReduceJob& job, size_t i, size_t at) {
    const char* p = static_cast<const char*>(job.in[i]) + at;
    if constexpr (kMemory != Memory::cached) {
      for (size_t line = 0; line < kCount * kVectorBytes; line += kLineBytes) {
        if constexpr (kMemory == Memory::taken_over) {
          prefetch_for_writing(p + kAhead + line);
        } else {
          __builtin_prefetch(p + kAhead + line);
        }
      }
    }
    return p;
  }

  // kCount whole vectors at the byte offset `at`.
  template <int kCount, Memory kMemory>
  static DPCORE_INLINE void block(const ReduceJob& job, Acc post, size_t at) {
    V acc[kCount * kParts];
    load<kCount>(job, 0, input<kCount, kMemory>(job, 0, at), acc);
    for (size_t i = 1; i < job.n_in; ++i) {
      V x[kCount * kParts];
      load<kCount>(job, i, input<kCount, kMemory>(job, i, at), x);
      combine<kCount>(acc, x);
    }
    finish<kCount>(job, acc, post, at, kCount * kVectorBytes);
    for (size_t k = 0; k < job.n_out; ++k) {
      char* out = static_cast<char*>(job.out[k]) + at;
      for (int v = 0; v < kCount; ++v) {
        Format::store(out + v * kVectorBytes, acc + v * kParts);
      }
    }
  }

  // All whole blocks from `at` on that leave `reserve` bytes behind them; returns where it ends.
  template <Memory kMemory>
  static DPCORE_INLINE size_t blocks(const ReduceJob& job, Acc post, size_t at, size_t end,
                                     size_t reserve) {
    for (; end - at >= kBlock + reserve; at += kBlock) {
      block<kVectors, kMemory>(job, post, at);
    }
    return at;
  }

  // n bytes at the offset `at`, less than a vector. The lanes behind them compute with zeros.
  static void part(const ReduceJob& job, Acc post, size_t at, size_t n) {
    alignas(kVectorBytes) char buffer[kVectorBytes];
    V acc[kParts];
    load_part(buffer, static_cast<const char*>(job.in[0]) + at, n);
    load<1>(job, 0, buffer, acc);
    for (size_t i = 1; i < job.n_in; ++i) {
      V x[kParts];
      load_part(buffer, static_cast<const char*>(job.in[i]) + at, n);
      load<1>(job, i, buffer, x);
      combine<1>(acc, x);
    }
    finish<1>(job, acc, post, at, n);
    Format::store(buffer, acc);
    for (size_t k = 0; k < job.n_out; ++k) {
      store_part(static_cast<char*>(job.out[k]) + at, buffer, n);
    }
  }

  // Bytes before the first output reaches an aligned vector, or none where it never does, or where
  // another output has: it may be a stage, whose lines are dearer than those of this rank's memory.
  static size_t head(const ReduceJob& job) {
    const auto before = [&job](size_t k) {
      return -reinterpret_cast<uintptr_t>(job.out[k]) % kVectorBytes;
    };
    for (size_t k = 1; k < job.n_out; ++k) {
      if (before(k) == 0) {
        return 0;
      }
    }
    return before(0) % (sizeof(Stored) * kGroup) == 0 ? before(0) : 0;
  }

  static void run(const ReduceJob& job) {
    const Acc post = static_cast<Acc>(job.post);
    const size_t end = job.count * sizeof(Stored);
    size_t at = 0;
    if (end >= (job.takes_over ? kLargeTakenOver : kLarge)) {
      at = head(job);
      if (at > 0) {
        part(job, post, 0, at);
      }
      // Not past the end: the lines there may be in use by another rank.
      if (job.takes_over) {
        at = blocks<Memory::taken_over>(job, post, at, end, kAhead);
      } else if (job.n_in <= kPrefetchedInputs) {
        at = blocks<Memory::prefetched>(job, post, at, end, kAhead);
      }
    }
    at = blocks<Memory::cached>(job, post, at, end, 0);
    for (; end - at >= kVectorBytes; at += kVectorBytes) {
      block<1, Memory::cached>(job, post, at);
    }
    if (at < end) {
      part(job, post, at, end - at);
    }
  }
};

template <class Format, class Op, int kGroup = 1>
void reduce_float(const ReduceJob& job) {
  if constexpr (std::is_same_v<Op, Sum>) {
    if (job.check.found != nullptr && job.pre == nullptr) {
      Kernel<Format, Op, false, kGroup, true>::run(job);
      return;
    }
  }
  if (job.pre == nullptr) {
    Kernel<Format, Op, false, kGroup>::run(job);
  } else {
    Kernel<Format, Op, true, kGroup>::run(job);
  }
}

template <class Format, class Op>
void reduce_integer(const ReduceJob& job) {
  Kernel<Format, Op, false>::run(job);
}

// Lines that another rank has just read or written. The C library copies with one string
// instruction here, which is slower at taking lines over from another processor's cache; and a
// line that another rank has read costs a way there and back before it can be written, so it is
// asked for ahead. kTakesOver: this rank writes the source next.
template <bool kTakesOver>
void copy_between_caches(void* dst, const void* src, size_t n) {
  constexpr size_t kStep = 4 * kVectorBytes;
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const auto copy_step = [to, from](size_t at) {
    for (size_t v = 0; v < kStep; v += kVectorBytes) {
      store_vector(to + at + v, load_vector<Vec<uint8_t>>(from + at + v));
    }
  };
  size_t at = 0;
  for (; n - at >= kCopyAhead + kStep; at += kStep) {
    for (size_t line = at + kCopyAhead; line < at + kCopyAhead + kStep; line += kLineBytes) {
      if constexpr (kTakesOver) {
        prefetch_for_writing(from + line);
      } else {
        __builtin_prefetch(from + line);
        prefetch_for_writing(to + line);
      }
    }
    copy_step(at);
  }
  for (; n - at >= kStep; at += kStep) {
    copy_step(at);
  }
  __builtin_memcpy(to + at, from + at, n - at);
}

// Into lines that another rank has read, and is going to read again.
void copy_past_caches(void* dst, const void* src, size_t n) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  size_t at = std::min(n, -reinterpret_cast<uintptr_t>(to) % kLineBytes);
  __builtin_memcpy(to, from, at);
  for (; n - at >= kLineBytes; at += kLineBytes) {
    for (size_t v = 0; v < kLineBytes; v += kVectorBytes) {
      store_past_caches(to + at + v, load_vector<Vec<uint8_t>>(from + at + v));
    }
  }
  __builtin_memcpy(to + at, from + at, n - at);
  fence_past_caches();
}

constexpr KernelTable make_table() {
  KernelTable table{};
  table.copy_past_caches = copy_past_caches;
  table.copy_between_caches = copy_between_caches<false>;
  table.copy_taking_over = copy_between_caches<true>;
  const auto set = [&table](DType dtype, ReduceOp op, ReduceKernel kernel) {
    table.reduce[static_cast<int>(dtype)][static_cast<int>(op)] = kernel;
  };
  const auto set_float = [&]<class Format>(DType dtype, Format) {
    set(dtype, ReduceOp::sum, reduce_float<Format, Sum>);
    set(dtype, ReduceOp::prod, reduce_float<Format, Prod>);
    set(dtype, ReduceOp::min, reduce_float<Format, Min>);
    set(dtype, ReduceOp::max, reduce_float<Format, Max>);
  };
  set_float(DType::f64, Plain<double>{});
  set_float(DType::f32, Plain<float>{});
  set_float(DType::f16, Float16{});
  set_float(DType::bf16, BFloat16{});

  // Sums and products wrap, which is the same for both signs and defined without one.
  const auto set_integer = [&]<class Signed, class Unsigned>(DType dtype, Signed, Unsigned) {
    set(dtype, ReduceOp::sum, reduce_integer<Plain<Unsigned>, Sum>);
    set(dtype, ReduceOp::prod, reduce_integer<Plain<Unsigned>, Prod>);
    set(dtype, ReduceOp::min, reduce_integer<Plain<Signed>, Min>);
    set(dtype, ReduceOp::max, reduce_integer<Plain<Signed>, Max>);
  };
  set_integer(DType::i64, int64_t{}, uint64_t{});
  set_integer(DType::i32, int32_t{}, uint32_t{});
  set_integer(DType::i16, int16_t{}, uint16_t{});
  set_integer(DType::i8, int8_t{}, uint8_t{});
  set_integer(DType::u8, uint8_t{}, uint8_t{});

  set(DType::u8, ReduceOp::band, reduce_integer<Plain<uint8_t>, BitAnd>);
  set(DType::u8, ReduceOp::bor, reduce_integer<Plain<uint8_t>, BitOr>);
  set(DType::u8, ReduceOp::bxor, reduce_integer<Plain<uint8_t>, BitXor>);
  set(DType::boolean, ReduceOp::band, reduce_integer<Boolean, BitAnd>);
  set(DType::boolean, ReduceOp::bor, reduce_integer<Boolean, BitOr>);
  set(DType::boolean, ReduceOp::bxor, reduce_integer<Boolean, BitXor>);

  set(DType::c64, ReduceOp::prod, reduce_float<Plain<float>, ComplexProd, 2>);
  set(DType::c128, ReduceOp::prod, reduce_float<Plain<double>, ComplexProd, 2>);
  return table;
}

}  // namespace
}  // namespace DPCORE_LEVEL

#define DPCORE_CONCAT_(a, b) a##b
#define DPCORE_CONCAT(a, b) DPCORE_CONCAT_(a, b)
#define DPCORE_STRING_(a) #a
#define DPCORE_STRING(a) DPCORE_STRING_(a)

const KernelTable& DPCORE_CONCAT(DPCORE_LEVEL, _kernels)() {
  static constexpr KernelTable kTable = [] {
    KernelTable table = DPCORE_LEVEL::make_table();
    table.level = DPCORE_STRING(DPCORE_LEVEL);
    return table;
  }();
  return kTable;
}

}  // namespace dpcore

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
