// The reduction kernels for any processor: 16-byte vectors (SSE2, NEON).
#include "comm/base/prefetch.h"
#include "comm/reduce/reduce_dispatch.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define DPCORE_LEVEL portable
#define DPCORE_VECTOR_BYTES 16
#include "comm/reduce/reduce_kernels.inl"
