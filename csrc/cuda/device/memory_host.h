// Memory of a device of the host, shared in the ways of a GPU's: by address within a process, by a
// descriptor (of a memfd) between processes.
//
// Threads: any, one at a time enters.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "cuda/device/device.h"

namespace dpcore {

class HostMemory {
 public:
  std::byte* allocate(size_t bytes);
  std::byte* allocate_shared(size_t bytes, MemoryKind kind);
  void release(std::byte* memory);

  MemoryHandle share(std::byte* memory);
  std::byte* map(const MemoryHandle& handle);
  void forget(std::byte* memory);

 private:
  struct Mapping {
    int descriptor = -1;  // of the own ones
    size_t bytes = 0;
  };

  std::byte* place(int descriptor, size_t bytes, bool own);
  bool take_away(std::byte* memory);

  std::mutex mutex_;
  std::map<std::byte*, Mapping> mapped_;
};

}  // namespace dpcore
