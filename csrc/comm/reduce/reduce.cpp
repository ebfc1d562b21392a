// Checks a reduction and hands it to the kernels of this processor.
#include "comm/reduce/reduce.h"

#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "comm/base/error.h"
#include "comm/base/switch.h"
#include "comm/reduce/reduce_dispatch.h"
#include "comm/reduce/reduce_lowering.h"
#include "comm/reduce/way_to_peers.h"

namespace dpcore {
namespace {

// What ranks hand to each other through their caches: from a few pages to a chunk of a stage.
constexpr size_t kCacheCopyFrom = 2048;
constexpr size_t kCacheCopyTo = 256 << 10;
// Less stays in the first-level caches, four buffers in turns.
constexpr size_t kPastCachesFrom = 8192;

// How memory for others is written. measured: the way that was faster until now.
enum class Stores { ordinary, past_caches, measured };

Stores choose_stores() {
  const std::optional<bool> wanted = switch_of("DPCORE_BYPASS_CACHES");
#if defined(DPCORE_X86_KERNELS)
  if (!wanted && __builtin_cpu_is("amd") != 0) {
    return Stores::measured;
  }
#endif
  return wanted.value_or(false) ? Stores::past_caches : Stores::ordinary;
}

uint64_t ticks() {
#if defined(DPCORE_X86_KERNELS)
  return __builtin_ia32_rdtsc();
#else
  return 0;  // nothing is measured
#endif
}

const KernelTable& choose_kernels() {
  const char* forced = std::getenv("DPCORE_SIMD");
  const std::string_view limit = forced == nullptr ? "" : forced;
  if (!limit.empty() && limit != "avx512" && limit != "avx2" && limit != "portable") {
    throw Unsupported("DPCORE_SIMD=" + std::string(limit) + ": use avx512, avx2 or portable");
  }
#if defined(DPCORE_X86_KERNELS)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (limit.empty() || limit == "avx512")) {
    return avx512_kernels();
  }
  if (has_avx2 && limit != "portable") {
    return avx2_kernels();
  }
#endif
  return portable_kernels();
}

// What a valid pair of type and operator runs, on `width` stored elements for each of its own.
struct Entry {
  ReduceKernel kernel = nullptr;
  DType dtype = DType::u8;  // of these
  size_t width = 1;
  bool takes_factors = false;
  bool takes_divisor = false;
};

Entry lower(const KernelTable& kernels, DType dtype, ReduceOp op) {
  const LoweredReduction to = lowered(dtype, op);
  // Kernels of complex products count the parts.
  const bool is_complex = to.dtype == DType::c64 || to.dtype == DType::c128;
  return Entry{kernels.reduce[static_cast<int>(to.dtype)][static_cast<int>(to.op)], to.dtype,
               is_complex ? 2 : to.width, takes_factors(to.dtype),
               is_valid(ReduceOp::mean, to.dtype) && !takes_factors(to.dtype)};
}

struct Dispatch {
  const KernelTable& kernels = choose_kernels();
  const Stores stores = choose_stores();
  Entry entries[kDTypeCount][kReduceOpCount];

  Dispatch() {
    for (int d = 0; d < kDTypeCount; ++d) {
      for (int o = 0; o < kReduceOpCount; ++o) {
        const auto dtype = static_cast<DType>(d);
        const auto op = static_cast<ReduceOp>(o);
        if (is_valid(op, dtype)) {
          entries[d][o] = lower(kernels, dtype, op);
        }
      }
    }
  }
};

const Dispatch& dispatch() {
  static const Dispatch dispatch;
  return dispatch;
}

// Says what is wrong with a reduction that has been refused.
[[noreturn, gnu::cold]] void refuse(const ReduceSpec& spec, size_t n_in, size_t n_out) {
  const std::string type(name_of(spec.dtype));
  if (!is_valid(spec.op, spec.dtype)) {
    std::string message = std::string(name_of(spec.op)) + " of " + type + " has no meaning: use ";
    const char* separator = "";
    for (int i = 0; i < kReduceOpCount; ++i) {
      const auto op = static_cast<ReduceOp>(i);
      if (!is_valid(op, spec.dtype)) {
        continue;
      }
      message += separator + std::string(name_of(op));
      separator = ", ";
    }
    throw Unsupported(message);
  }
  if (n_in == 0 || n_out == 0) {
    throw Unsupported("a reduction needs at least one input and one output: it got " +
                      std::to_string(n_in) + " and " + std::to_string(n_out));
  }
  if (spec.divisor != 1) {
    throw Unsupported("a divisor needs a type of integers, not " + type + ": give a factor");
  }
  throw Unsupported("factors need a floating-point type, not " + type +
                    ": reduce without them, then scale");
}

// The first output holds the sum; all of them get the quotient.
template <class T>
void divide(std::span<void* const> out, size_t count, uint32_t divisor) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  const T* sums = static_cast<const T*>(out[0]);
  for (size_t i = 0; i < count; ++i) {
    const T quotient = static_cast<T>(static_cast<Wide>(sums[i]) / static_cast<Wide>(divisor));
    for (void* each : out) {
      static_cast<T*>(each)[i] = quotient;
    }
  }
}

void divide(DType dtype, std::span<void* const> out, size_t count, uint32_t divisor) {
  switch (dtype) {
    case DType::i64:
      return divide<int64_t>(out, count, divisor);
    case DType::i32:
      return divide<int32_t>(out, count, divisor);
    case DType::i16:
      return divide<int16_t>(out, count, divisor);
    case DType::i8:
      return divide<int8_t>(out, count, divisor);
    default:
      return divide<uint8_t>(out, count, divisor);
  }
}

}  // namespace

ReduceSpec reduction_over(int world, ReduceOp op, DType dtype) {
  ReduceSpec spec{.dtype = dtype, .op = op};
  if (op == ReduceOp::mean || op == ReduceOp::premul_sum) {
    spec.op = ReduceOp::sum;
  }
  if (op == ReduceOp::mean && takes_factors(dtype)) {
    spec.post = 1.0 / world;
  } else if (op == ReduceOp::mean) {
    spec.divisor = static_cast<uint32_t>(world);
  }
  return spec;
}

void reduce(const ReduceSpec& spec, std::span<const void* const> in, std::span<void* const> out,
            size_t count) {
  const Dispatch& table = dispatch();
  Entry entry = table.entries[static_cast<int>(spec.dtype)][static_cast<int>(spec.op)];
  const bool has_factors = spec.pre != nullptr || spec.post != 1.0;
  const bool divides = spec.divisor != 1;
  if (entry.kernel == nullptr || in.empty() || out.empty() ||
      (has_factors && !entry.takes_factors) || (divides && !entry.takes_divisor)) {
    refuse(spec, in.size(), out.size());
  }
  if (divides) {  // a second pass: integers that are averaged are few
    const ReduceSpec sum{.dtype = spec.dtype, .op = spec.op, .takes_over = spec.takes_over};
    reduce(sum, in, out.first(1), count);
    divide(spec.dtype, out, count, spec.divisor);
    return;
  }
  if (in.size() == 1 && !has_factors && spec.dtype != DType::boolean) {
    // One operand and no factor: its bits, unchanged.
    if (out.size() == 1) {
      if (out[0] != in[0]) {
        copy_bytes(out[0], in[0], count * size_of(spec.dtype));
      }
      return;
    }
    entry = lower(table.kernels, DType::u8, ReduceOp::bor);
    entry.width = size_of(spec.dtype);
  }
  entry.kernel({in.data(), in.size(), out.data(), out.size(), count * entry.width, spec.pre,
                spec.post, spec.takes_over, spec.check, entry.dtype, entry.width});
}

void copy_bytes(void* dst, const void* src, size_t n) {
  if (n == 0) {
    return;
  }
  if (n >= kCacheCopyFrom && n <= kCacheCopyTo) {
    dispatch().kernels.copy_between_caches(dst, src, n);
  } else {
    std::memcpy(dst, src, n);
  }
}

bool bypasses_caches() { return dispatch().stores != Stores::ordinary; }

void copy_to_peers(void* dst, const void* src, size_t n) {
  static WayToPeers measured;
  const Dispatch& how = dispatch();
  if (n < kPastCachesFrom || how.stores == Stores::ordinary) {
    copy_bytes(dst, src, n);
  } else if (how.stores == Stores::past_caches) {
    how.kernels.copy_past_caches(dst, src, n);
  } else {
    const WayToPeers::Way way = measured.next();
    const uint64_t begin = ticks();
    if (way == WayToPeers::past_caches) {
      how.kernels.copy_past_caches(dst, src, n);
    } else {
      std::memcpy(dst, src, n);
    }
    measured.took(way, ticks() - begin, n);
  }
}

void copy_from_peer(void* dst, const void* src, size_t n) {
  if (n >= kPastCachesFrom && bypasses_caches()) {
    std::memcpy(dst, src, n);
  } else {
    copy_bytes(dst, src, n);
  }
}

void copy_taking_over(void* dst, const void* src, size_t n) {
  if (n > 0) {
    dispatch().kernels.copy_taking_over(dst, src, n);
  }
}

std::string_view simd_level() { return dispatch().kernels.level; }

}  // namespace dpcore
