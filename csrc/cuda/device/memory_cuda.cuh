// Memory of one GPU: what is allocated there, and what of other ranks is mapped.
//
// Internal to device_cuda.cu. Memory that is shared by descriptor is physical memory with addresses
// of its own on each rank, which goes when the last rank lets go. Memory by ipc or address is
// cudaMalloc's; its owner keeps it until the others have forgotten it.
//
// Threads: any; a lock is held while a call of CUDA changes what is mapped.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <set>

#include "cuda/device/device.h"

namespace dpcore {

class CudaMemory {
 public:
  explicit CudaMemory(int device) : device_(device) {}

  MemorySupport support() const;
  std::byte* allocate(size_t bytes);
  std::byte* allocate_shared(size_t bytes, MemoryKind kind);
  // Waits for the device first, unless no work uses the memory.
  void release(std::byte* memory, bool is_idle);

  MemoryHandle share(std::byte* memory);
  std::byte* map(const MemoryHandle& handle);
  void forget(std::byte* memory);
  // At the end, with the device current.
  void stop_freeing();

 private:
  struct Physical {
    unsigned long long handle = 0;
    size_t bytes = 0;
  };

  bool has_attribute(int attribute) const;
  std::byte* place(const Physical& physical);
  void take_away(std::byte* memory, const Physical& physical);
  bool free_without_waiting(std::byte* memory);
  void allow_access(unsigned long long address, size_t bytes);
  void reach(int other);
  std::string name() const { return "cuda:" + std::to_string(device_); }

  int device_;
  std::mutex mutex_;
  std::map<std::byte*, Physical> physical_;  // own and mapped ones
  std::set<std::byte*> by_ipc_;              // own memory that other processes open
  cudaStream_t freeing_ = nullptr;
  std::multimap<std::byte*, void*> opened_;  // by ipc: what was opened, for what was asked for
};

}  // namespace dpcore
