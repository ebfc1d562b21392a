// Sizes, stacks of free blocks, and what is given back to the kernel.
#include "tensors/warm_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "comm/base/clock.h"

namespace dpcore {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Addresses are never used for another size, so there are more of them than memory.
constexpr size_t kAddressesPerByte = 8;
constexpr int kLogOfSmallest = std::countr_zero(WarmPool::kSmallest);

std::byte* reserve(size_t bytes, int protection) {
  void* range =
      mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range == MAP_FAILED ? nullptr : static_cast<std::byte*>(range);
}

template <typename T>
void raise_to(std::atomic<T>& most, T value) {
  T now = most.load(std::memory_order_relaxed);
  while (now < value && !most.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
}

void lower_to(std::atomic<int64_t>& fewest, int64_t value) {
  int64_t now = fewest.load(std::memory_order_relaxed);
  while (now > value && !fewest.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

WarmPool::WarmPool(size_t memory) : largest_(memory / kHugePage * kHugePage) {
  const size_t bytes = largest_ * kAddressesPerByte;
  base_ = reserve(bytes + kHugePage, PROT_NONE);
  auto* blocks = reserve((bytes / kSmallest + 1) * sizeof(Block), PROT_READ | PROT_WRITE);  // zeros
  if (base_ == nullptr || blocks == nullptr) {
    largest_ = 0;
    return;
  }
  blocks_ = reinterpret_cast<Block*>(blocks);
  base_ += (kHugePage - reinterpret_cast<uintptr_t>(base_) % kHugePage) % kHugePage;
  reserved_ = bytes;
}

// ---- sizes -----------------------------------------------------------------------------------

size_t WarmPool::size_of(size_t bytes) {
  const int log = std::max<int>(std::bit_width(bytes) - 1, kLogOfSmallest);
  const size_t eighth = size_t{1} << (log - 3);
  return static_cast<size_t>(log - kLogOfSmallest) * 8 + (bytes + eighth - 1) / eighth - 8;
}

size_t WarmPool::bytes_of(size_t size) {
  return (8 + size % 8) << (kLogOfSmallest - 3 + static_cast<int>(size / 8));
}

// ---- stacks ----------------------------------------------------------------------------------

void WarmPool::push(Stack& stack, uint32_t block) {
  uint64_t first = stack.first.load(std::memory_order_relaxed);
  uint64_t now = 0;
  do {
    blocks_[block].next.store(static_cast<uint32_t>(first), std::memory_order_relaxed);
    now = ((first >> 32) + 1) << 32 | block;
  } while (!stack.first.compare_exchange_weak(first, now, std::memory_order_release,
                                              std::memory_order_relaxed));
}

uint32_t WarmPool::pop(Stack& stack) {
  uint64_t first = stack.first.load(std::memory_order_acquire);
  uint64_t now = 0;
  do {
    if (static_cast<uint32_t>(first) == 0) {
      return 0;
    }
    const uint32_t next =
        blocks_[static_cast<uint32_t>(first)].next.load(std::memory_order_relaxed);
    now = ((first >> 32) + 1) << 32 | next;
  } while (!stack.first.compare_exchange_weak(first, now, std::memory_order_acquire));
  return static_cast<uint32_t>(first);
}

uint32_t WarmPool::pop_warm(size_t size) {
  Size& of = sizes_[size];
  const uint32_t block = pop(of.warm);
  if (block != 0) {
    lower_to(of.fewest, of.kept.fetch_sub(1, std::memory_order_relaxed) - 1);
    kept_.fetch_sub(bytes_of(size), std::memory_order_relaxed);
  }
  return block;
}

// ---- blocks ----------------------------------------------------------------------------------

uint32_t WarmPool::cut(size_t size) {
  const size_t bytes = bytes_of(size);
  const size_t room = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  size_t begin = cut_.load(std::memory_order_relaxed);
  do {
    if (room > reserved_ || begin > reserved_ - room) {
      return 0;
    }
  } while (!cut_.compare_exchange_weak(begin, begin + room, std::memory_order_relaxed));
  const auto block = static_cast<uint32_t>(begin / kSmallest + 1);
  blocks_[block].size.store(static_cast<uint32_t>(size), std::memory_order_relaxed);
  if (mprotect(address_of(block), room, PROT_READ | PROT_WRITE) != 0) {
    return 0;
  }
  if (bytes >= kHugePage) {
    madvise(address_of(block), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
  return block;
}

void* WarmPool::take(size_t bytes) {
  if (bytes > largest_) {
    return nullptr;
  }
  const size_t size = size_of(std::max(bytes, kSmallest));
  if (size >= kSizes) {
    return nullptr;
  }
  end_window_in_time();
  uint32_t block = pop_warm(size);
  (block != 0 ? taken_warm_ : taken_cold_).fetch_add(1, std::memory_order_relaxed);
  if (block == 0) {
    block = pop(sizes_[size].cold);
  }
  if (block == 0) {
    block = cut(size);
  }
  if (block == 0) {
    return nullptr;
  }
  raise_to(most_, used_.fetch_add(bytes_of(size), std::memory_order_relaxed) + bytes_of(size));
  return address_of(block);
}

void WarmPool::give_back(void* address, bool keep) {
  const size_t at = static_cast<size_t>(static_cast<std::byte*>(address) - base_);
  const auto block = static_cast<uint32_t>(at / kSmallest + 1);
  const size_t size = blocks_[block].size.load(std::memory_order_relaxed);
  const size_t bytes = bytes_of(size);
  const size_t used = used_.fetch_sub(bytes, std::memory_order_relaxed) - bytes;
  const size_t most =
      std::max(most_.load(std::memory_order_relaxed), most_before_.load(std::memory_order_relaxed));
  const size_t held = used + bytes + kept_.load(std::memory_order_relaxed);
  if (!keep || held > most + most / 2) {
    cool(block);
    return;
  }
  sizes_[size].kept.fetch_add(1, std::memory_order_relaxed);
  kept_.fetch_add(bytes, std::memory_order_relaxed);
  push(sizes_[size].warm, block);
}

// Its addresses stay, its memory goes.
void WarmPool::cool(uint32_t block) {
  const size_t size = blocks_[block].size.load(std::memory_order_relaxed);
  madvise(address_of(block), bytes_of(size), MADV_DONTNEED);
  push(sizes_[size].cold, block);
}

void WarmPool::release_kept() {
  for (size_t size = 0; size < kSizes; ++size) {
    while (const uint32_t block = pop_warm(size)) {
      cool(block);
    }
  }
}

// ---- windows ---------------------------------------------------------------------------------

void WarmPool::end_window_in_time() {
  const int64_t now = now_ns();
  int64_t end = window_end_ns_.load(std::memory_order_relaxed);
  if (now >= end && window_end_ns_.compare_exchange_strong(end, now + kWindowNs)) {
    end_window();
  }
}

void WarmPool::end_window() {
  for (size_t size = 0; size < kSizes; ++size) {
    Size& of = sizes_[size];
    for (int64_t unused = of.fewest.load(std::memory_order_relaxed); unused > 0; --unused) {
      const uint32_t block = pop_warm(size);
      if (block == 0) {
        break;
      }
      cool(block);
    }
    of.fewest.store(of.kept.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  most_before_.store(most_.exchange(used_.load(std::memory_order_relaxed)));
}

WarmPool::Figures WarmPool::figures() const {
  return {used_.load(), kept_.load(), std::max(most_.load(), most_before_.load()),
          taken_warm_.load(), taken_cold_.load()};
}

}  // namespace dpcore
