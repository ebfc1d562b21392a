// What a thread that spins does between two looks: tells the processor, so that the thread beside
// it on the same core gets more of it.
#pragma once

namespace dpcore {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace dpcore
