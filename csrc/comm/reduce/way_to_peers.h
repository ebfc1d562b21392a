// Which stores write what other ranks read next: ordinary ones, or those that bypass the caches.
//
// On AMD a line that another processor has read is slow to write again once it has left the
// first-level caches, and stores that bypass them are as fast wherever that processor is (decision
// 49). But where two virtual processors are threads of a core, ordinary stores are twice as fast,
// and that changes while a job runs. So a process times its copies: now and then a few go each
// way, one after the other, and the others as the faster of these did (decision 86).
//
// Any thread copies. Its numbers race, and a lost one is one copy that does not count.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace dpcore {

class WayToPeers {
 public:
  enum Way : uint8_t { ordinary, past_caches };

  Way next() {
    const uint32_t turn = copies_.fetch_add(1, std::memory_order_relaxed) % kTurns;
    if (turn == 0) {
      least_[ordinary].store(kUnknown, std::memory_order_relaxed);
      least_[past_caches].store(kUnknown, std::memory_order_relaxed);
    }
    if (turn < 2 * kTries) {
      return turn < kTries ? ordinary : past_caches;
    }
    if (turn == 2 * kTries) {
      const bool gains = kReaderPays * least_[past_caches].load(std::memory_order_relaxed) <
                         least_[ordinary].load(std::memory_order_relaxed);
      faster_.store(gains ? past_caches : ordinary, std::memory_order_relaxed);
    }
    return faster_.load(std::memory_order_relaxed);
  }

  // A copy of so many bytes took so many ticks.
  void took(Way way, uint64_t ticks, size_t bytes) {
    const float cost = static_cast<float>(ticks) / static_cast<float>(bytes);
    const float least = least_[way].load(std::memory_order_relaxed);
    least_[way].store(std::min(least, cost), std::memory_order_relaxed);
  }

 private:
  static constexpr uint32_t kTurns = 1024;
  static constexpr uint32_t kTries = 4;  // each way
  static constexpr float kUnknown = std::numeric_limits<float>::max();
  // What was written past the caches comes to its reader from farther away. Where the writer takes
  // the same time either way, the whole takes 1.5 to 2 times as long.
  static constexpr float kReaderPays = 1.5f;

  std::atomic<uint32_t> copies_{0};
  std::atomic<float> least_[2] = {kUnknown, kUnknown};  // ticks for a byte
  std::atomic<Way> faster_{ordinary};
};

}  // namespace dpcore
