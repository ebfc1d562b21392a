// How one rank wakes another: a futex word in shared memory, rung only when somebody sleeps.
//
// Sleeper: announce (asleep + 1), look once more whether there is work, sleep, withdraw.
// Ringer:  publish the work, fence, look at asleep, ring.
// The two fences make it impossible that the sleeper misses the work and the ringer misses the
// sleeper. All threads of an endpoint sleep on the endpoint's own bell.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace dpcore {

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) {
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> asleep{0};
  // Where its owner last began an operation or waited. Seldom written, so that those who ring
  // keep this line in their caches.
  std::atomic<int32_t> processor{-1};

  void note_processor(int32_t now) {
    if (processor.load(std::memory_order_relaxed) != now) {
      processor.store(now, std::memory_order_relaxed);
    }
  }

  void ring() {
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(rings);
  }

  // To be asked after publishing with release stores and fence_before_look().
  bool is_anybody_asleep() {
#if defined(__SANITIZE_THREAD__)
    // The thread sanitizer does not know fences; a read-modify-write says the same.
    return asleep.fetch_add(0, std::memory_order_seq_cst) != 0;
#else
    return asleep.load(std::memory_order_relaxed) != 0;
#endif
  }

  static void fence_before_look() {
#if !defined(__SANITIZE_THREAD__)
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }

  uint32_t announce_sleep() {
    asleep.fetch_add(1, std::memory_order_seq_cst);
    return rings.load(std::memory_order_seq_cst);
  }
  void withdraw() { asleep.fetch_sub(1, std::memory_order_relaxed); }
};

}  // namespace dpcore
