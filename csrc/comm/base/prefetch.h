// Asks for a cache line with the right to write it, which takes it away from a processor that has
// it. The compiler's own prefetch for writing becomes one for reading unless the whole file is
// compiled for processors that know the instruction; all others treat it as a no-op.
#pragma once

namespace dpcore {

inline void prefetch_for_writing(const void* at) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 1);
#endif
}

}  // namespace dpcore
