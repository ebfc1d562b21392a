// torch's allocator for the CPU, with a pool of warm memory for large blocks: warm_pool.h.
//
// It is installed the first time that warm memory is used, and hands requests on to the allocator
// that was there before: small ones, and large ones where nothing wants warm memory. It stays
// installed, and is never destroyed: tensors that it made may be freed at any time, on any thread,
// in a forked child, and while the process exits. torch's memory profiler hears of its blocks as of
// others.
//
// Threads: any; no lock is taken here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensors/warm_pool.h"

namespace dpcore {

// While one of these lives, large blocks come from the pool: all, or those of threads whose chooser
// wants it (place_leases.h). When the last one goes, what the pool keeps goes back to the kernel.
class WarmMemory {
 public:
  enum class For : uint8_t { all, choosers };
  explicit WarmMemory(For whom);
  ~WarmMemory();
  WarmMemory(const WarmMemory&) = delete;
  WarmMemory& operator=(const WarmMemory&) = delete;

 private:
  For whom_;
};

// Whether all large blocks come from the pool. False where another allocator has taken torch's
// place.
bool is_memory_warm();
// Null before its first use.
WarmPool* warm_pool();

}  // namespace dpcore
