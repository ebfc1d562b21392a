// Checks and lowers a reduction, then hands it to the kernels of this processor.
#include "comm/reduce.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "comm/error.h"
#include "comm/reduce_dispatch.h"

namespace dpcore {
namespace {

const KernelTable& choose_kernels() {
  const char* forced = std::getenv("DPCORE_SIMD");
  const std::string_view limit = forced == nullptr ? "" : forced;
  if (!limit.empty() && limit != "avx512" && limit != "avx2" && limit != "portable") {
    throw Unsupported("DPCORE_SIMD=" + std::string(limit) + ": use avx512, avx2 or portable");
  }
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (limit.empty() || limit == "avx512")) return avx512_kernels();
  if (has_avx2 && limit != "portable") return avx2_kernels();
#endif
  return portable_kernels();
}

const KernelTable& kernels() {
  static const KernelTable& table = choose_kernels();
  return table;
}

// Below this, memcpy is faster even into memory that nobody reads again: its stores end in the
// last-level cache. Measured with one thread and a 35 MiB cache, GB/s, memcpy against streaming:
// 1 MiB 13.4 and 6.0, 4 MiB 9.7 and 5.9, 16 MiB 4.8 and 5.1, 64 MiB 4.8 and 4.9, 256 MiB 4.6
// and 4.9 (streaming page by page, not four pages at once: 4.5, 4.6, 4.3).
constexpr size_t kStreamedCopy = 8 << 20;

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

bool is_floating(DType dtype) { return is_valid(ReduceOp::mean, dtype); }

// Which kernel does the work, on elements `width` times as many.
struct Lowered {
  DType dtype;
  ReduceOp op;
  size_t width;
};

Lowered lower(DType dtype, ReduceOp op) {
  if (op == ReduceOp::mean || op == ReduceOp::premul_sum) op = ReduceOp::sum;
  if (dtype == DType::boolean) {
    if (op == ReduceOp::sum || op == ReduceOp::max) op = ReduceOp::bor;
    if (op == ReduceOp::prod || op == ReduceOp::min) op = ReduceOp::band;
    return {dtype, op, 1};
  }
  // Bits do not care about the width of the integer they are in.
  if (is_bitwise(op)) return {DType::u8, op, size_of(dtype)};
  // The sum of complex numbers is the sum of their parts, and the factors are real.
  if (op == ReduceOp::sum && dtype == DType::c64) return {DType::f32, op, 2};
  if (op == ReduceOp::sum && dtype == DType::c128) return {DType::f64, op, 2};
  const bool is_complex = dtype == DType::c64 || dtype == DType::c128;
  return {dtype, op, is_complex ? size_t{2} : size_t{1}};
}

[[noreturn]] void throw_invalid(ReduceOp op, DType dtype) {
  std::string message = std::string(name_of(op)) + " of " + std::string(name_of(dtype)) +
                        " has no meaning: use ";
  const char* separator = "";
  for (int i = 0; i < kReduceOpCount; ++i) {
    const auto valid = static_cast<ReduceOp>(i);
    if (!is_valid(valid, dtype)) continue;
    message += separator + std::string(name_of(valid));
    separator = ", ";
  }
  throw Unsupported(message);
}

void check(const ReduceSpec& spec, size_t n_in, size_t n_out) {
  if (!is_valid(spec.op, spec.dtype)) throw_invalid(spec.op, spec.dtype);
  if (n_in == 0 || n_out == 0) {
    throw Unsupported("a reduction needs at least one input and one output: it got " +
                      std::to_string(n_in) + " and " + std::to_string(n_out));
  }
  if ((spec.pre != nullptr || spec.post != 1.0) && !is_floating(spec.dtype)) {
    throw Unsupported("factors need a floating-point type, not " +
                      std::string(name_of(spec.dtype)) + ": sum without them, then divide");
  }
}

// A line that was just read is in the cache already: streaming it back out costs a quarter of
// the speed instead of saving a read.
bool is_in_place(std::span<const void* const> in, std::span<void* const> out) {
  return std::any_of(out.begin(), out.end(), [in](const void* address) {
    return std::find(in.begin(), in.end(), address) != in.end();
  });
}

}  // namespace

void reduce(const ReduceSpec& spec, std::span<const void* const> in, std::span<void* const> out,
            size_t count) {
  check(spec, in.size(), out.size());
  Lowered lowered = lower(spec.dtype, spec.op);
  if (in.size() == 1 && spec.pre == nullptr && spec.post == 1.0 &&
      spec.dtype != DType::boolean) {
    // One operand and no factor: its bits, unchanged.
    if (out.size() == 1) {
      if (out[0] != in[0]) copy_bytes(out[0], in[0], count * size_of(spec.dtype), spec.streaming);
      return;
    }
    lowered = {DType::u8, ReduceOp::bor, size_of(spec.dtype)};
  }
  const ReduceKernel kernel =
      kernels().reduce[static_cast<int>(lowered.dtype)][static_cast<int>(lowered.op)];
  kernel({in.data(), in.size(), out.data(), out.size(), count * lowered.width, spec.pre, spec.post,
          spec.streaming && !is_in_place(in, out)});
}

void copy_bytes(void* dst, const void* src, size_t n, bool streaming) {
  if (n == 0) return;
  if (streaming && n >= kStreamedCopy) {
    kernels().copy_streaming(dst, src, n);
  } else {
    std::memcpy(dst, src, n);
  }
}

std::string_view simd_level() { return kernels().level; }

}  // namespace dpcore
