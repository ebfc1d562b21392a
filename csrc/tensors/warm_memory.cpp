// See warm_memory.h.
#include "tensors/warm_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "tensors/place_leases.h"

namespace dpcore {
namespace {

// Allocators that other libraries install have the default priority, 0.
constexpr uint8_t kPriority = 1;

std::atomic<int> warm_users{0};    // for all blocks
std::atomic<int> warm_keepers{0};  // for all or some

size_t memory_of_machine() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long bytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && bytes > 0 ? static_cast<size_t>(pages) * static_cast<size_t>(bytes)
                                : size_t{1} << 34;
}

class WarmAllocator final : public c10::Allocator {
 public:
  explicit WarmAllocator(c10::Allocator* former) : pool_(memory_of_machine()), former_(former) {}

  static WarmAllocator* installed() { return installed_.load(std::memory_order_acquire); }
  static WarmAllocator& install();

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= WarmPool::kSmallest && warm_keepers.load(std::memory_order_relaxed) > 0) {
      if (void* block = take(bytes)) {
        c10::profiledCPUMemoryReporter().New(block, bytes);
        return {block, block, &release, c10::Device(c10::kCPU)};
      }
    }
    return former_->allocate(bytes);
  }
  // For callers of raw_deallocate(), oneDNN is one. They may bring blocks from before this was
  // installed.
  c10::DeleterFnPtr raw_deleter() const override {
    return former_->raw_deleter() == nullptr ? nullptr : &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  WarmPool& pool() { return pool_; }

 private:
  void* take(size_t bytes) {
    PlaceChooser* chooser = place_chooser();
    if (chooser == nullptr || !chooser->wants_warm_memory()) {
      return warm_users.load(std::memory_order_relaxed) > 0 ? pool_.take(bytes) : nullptr;
    }
    if (void* place = chooser->choose(bytes)) {
      return place;
    }
    void* block = pool_.take(bytes);
    chooser->note(bytes, block);
    return block;
  }
  static void release(void* block) {
    WarmAllocator& self = *installed();
    if (block != nullptr && self.pool_.has(block)) {
      c10::profiledCPUMemoryReporter().Delete(block);
      self.pool_.give_back(block, warm_keepers.load(std::memory_order_relaxed) > 0);
    } else if (lease_on(block) != Lease::none) {
      c10::profiledCPUMemoryReporter().Delete(block);
      end_lease(block);
    } else if (const c10::DeleterFnPtr before = self.former_->raw_deleter()) {
      before(block);
    }
  }

  static inline std::atomic<WarmAllocator*> installed_{nullptr};
  WarmPool pool_;
  c10::Allocator* former_;
};

WarmAllocator& WarmAllocator::install() {
  static WarmAllocator* const once = [] {
    auto* made = new WarmAllocator(c10::GetCPUAllocator());
    installed_.store(made, std::memory_order_release);
    c10::SetCPUAllocator(made, kPriority);
    return made;
  }();
  return *once;
}

}  // namespace

WarmMemory::WarmMemory(For whom) : whom_(whom) {
  WarmAllocator::install();
  warm_keepers.fetch_add(1);
  warm_users.fetch_add(whom_ == For::all ? 1 : 0);
}

WarmMemory::~WarmMemory() {
  warm_users.fetch_sub(whom_ == For::all ? 1 : 0);
  if (warm_keepers.fetch_sub(1) == 1) {
    warm_pool()->release_kept();
  }
}

bool is_memory_warm() {
  return warm_users.load() > 0 && c10::GetCPUAllocator() == WarmAllocator::installed();
}

WarmPool* warm_pool() {
  WarmAllocator* allocator = WarmAllocator::installed();
  return allocator == nullptr ? nullptr : &allocator->pool();
}

}  // namespace dpcore
