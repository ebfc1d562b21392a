// A lock for a few instructions, in places that must not sleep. Works with std::lock_guard.
#pragma once

#include <atomic>

namespace dpcore {

// What a thread that spins does between two polls: tells the processor, so that the thread beside
// it on the same core gets more of it.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
      pause_briefly();
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_;
};

}  // namespace dpcore
