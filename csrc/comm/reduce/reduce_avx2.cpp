// The reduction kernels for x86 with AVX2 and F16C: 32-byte vectors. The target leaves
// out FMA on purpose: the sum of products must round like on every other processor.
#include "comm/base/prefetch.h"
#include "comm/reduce/reduce_dispatch.h"

#if defined(DPCORE_X86_KERNELS)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define DPCORE_LEVEL avx2
#define DPCORE_VECTOR_BYTES 32
#include "comm/reduce/reduce_kernels.inl"
#pragma GCC pop_options

#endif
