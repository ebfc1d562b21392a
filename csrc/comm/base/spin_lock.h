// A lock for a few instructions, in places that must not sleep. Works with std::lock_guard.
#pragma once

#include <atomic>

#include "comm/base/pause.h"

namespace dpcore {

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
