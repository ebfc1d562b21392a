// The reduction kernels for x86 with AVX-512 (F, BW, DQ, VL): 64-byte vectors.
#include "comm/base/prefetch.h"
#include "comm/reduce/reduce_dispatch.h"

#if defined(DPCORE_X86_KERNELS)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define DPCORE_LEVEL avx512
#define DPCORE_VECTOR_BYTES 64
#include "comm/reduce/reduce_kernels.inl"
#pragma GCC pop_options

#endif
