// A pool of large blocks of memory that stay warm: mapped, and touched before.
//
// malloc gives large blocks back to the kernel when they are freed, and the next one of that size
// is page after page faulted in and zeroed anew: of a training step on a CPU, a third can be that.
// The pool keeps freed blocks for the next request of their size, rounded up to an eighth of a
// power of two, with huge pages where the kernel gives them.
//
// What it keeps is bounded by what was used last. In a window of some seconds it notes how many
// blocks of a size were never needed, and gives those back; and with what it keeps, it never holds
// more than 1.5 times the most that was in use at once in this window and the one before.
//
// Memory: one range of addresses, reserved once and never unmapped, from which blocks are cut.
// Nothing else is allocated. Threads: any. No lock is taken, so blocks may be freed anywhere, in a
// forked child and during exit too.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dpcore {

class WarmPool {
 public:
  // Smaller blocks are not for the pool: malloc keeps those by itself.
  static constexpr size_t kSmallest = size_t{1} << 20;
  static constexpr int64_t kWindowNs = 5'000'000'000;

  // `memory`: of the machine. A block is at most as large, and the addresses are several times
  // that. Where the process may not reserve them, nothing is ever taken.
  explicit WarmPool(size_t memory);

  // At least so many bytes, aligned to 2 MiB. Null when there is no room.
  void* take(size_t bytes);
  bool has(const void* block) const {
    return static_cast<size_t>(static_cast<const std::byte*>(block) - base_) < reserved_;
  }
  // `keep`: for the next one who takes as much, within the bound.
  void give_back(void* block, bool keep);
  // Everything that is kept goes back to the kernel.
  void release_kept();
  // At the end of a window, which the clock decides, or a test: what was not needed in it goes.
  void end_window();
  void end_window_in_time();

  struct Figures {
    size_t used = 0;      // bytes of blocks that are out
    size_t kept = 0;      // of blocks that wait to be taken
    size_t most = 0;      // that were out at once, in this window and the one before
    uint64_t warm = 0;    // blocks taken so far that were kept before
    uint64_t mapped = 0;  // blocks taken so far that the kernel had to give
  };
  Figures figures() const;

 private:
  // A stack without locks: the number of its first block, and a count against mistaking a block
  // that was taken and given back meanwhile for one that never moved.
  struct Stack {
    std::atomic<uint64_t> first{0};
  };
  struct Size {
    Stack warm;
    Stack cold;  // addresses without memory
    std::atomic<int64_t> kept{0};
    std::atomic<int64_t> fewest{0};  // kept at once, in this window
  };
  struct Block {
    std::atomic<uint32_t> next;
    std::atomic<uint32_t> size;
  };
  static constexpr size_t kSizes = 8 * 24;

  static size_t size_of(size_t bytes);  // its number
  static size_t bytes_of(size_t size);
  void push(Stack& stack, uint32_t block);
  uint32_t pop(Stack& stack);  // 0: none
  uint32_t pop_warm(size_t size);
  uint32_t cut(size_t size);
  void cool(uint32_t block);
  void* address_of(uint32_t block) const { return base_ + (block - 1) * kSmallest; }

  std::byte* base_ = nullptr;
  size_t reserved_ = 0;
  size_t largest_;
  Block* blocks_ = nullptr;  // one per MiB of addresses
  std::atomic<size_t> cut_{0};
  std::array<Size, kSizes> sizes_;
  std::atomic<size_t> used_{0};
  std::atomic<size_t> kept_{0};
  std::atomic<size_t> most_{0};
  std::atomic<size_t> most_before_{0};
  std::atomic<int64_t> window_end_ns_{0};
  std::atomic<uint64_t> taken_warm_{0};
  std::atomic<uint64_t> taken_cold_{0};
};

}  // namespace dpcore
