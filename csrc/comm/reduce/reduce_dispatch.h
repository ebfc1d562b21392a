// Internal to reduce*.cpp: one table of kernels per instruction set.
//
// The three tables come from the same source, reduce_kernels.inl, compiled for three
// targets. reduce.cpp picks one of them once per process.
#pragma once

#include <cstddef>
#include <string_view>

#include "comm/base/types.h"
#include "comm/reduce/not_finite.h"

// The thread sanitizer sees every access of the portable kernels, and the others take it minutes
// to compile: its build leaves them out.
#if defined(__x86_64__) && !defined(DPCORE_PORTABLE_KERNELS)
#define DPCORE_X86_KERNELS 1
#endif

namespace dpcore {

// The arguments of reduce(), checked and lowered: what a kernel sees.
struct ReduceJob {
  const void* const* in;
  size_t n_in;
  void* const* out;
  size_t n_out;
  size_t count;
  const double* pre;  // n_in factors, or null
  double post;
  bool takes_over;
  FiniteCheck check;  // asked for: of a sum without factors
  DType dtype;        // of what the kernel sees
  size_t width;       // of these in an element
};

// `results`: of the bytes at the offset `at`, which are not stored yet; one may be NaN or Inf.
[[gnu::cold]] void look_for_not_finite(const ReduceJob& job, const char* results, size_t at,
                                       size_t bytes);

using ReduceKernel = void (*)(const ReduceJob& job);

struct KernelTable {
  std::string_view level;
  // Null where the operator has no kernel of its own for the type: see lower() in reduce.cpp.
  ReduceKernel reduce[kDTypeCount][kReduceOpCount];
  void (*copy_between_caches)(void* dst, const void* src, size_t n);
  void (*copy_taking_over)(void* dst, const void* src, size_t n);
  void (*copy_past_caches)(void* dst, const void* src, size_t n);
};

const KernelTable& portable_kernels();

#if defined(DPCORE_X86_KERNELS)
const KernelTable& avx2_kernels();    // needs avx2, f16c
const KernelTable& avx512_kernels();  // needs avx512 f, bw, dq, vl
#endif

}  // namespace dpcore
