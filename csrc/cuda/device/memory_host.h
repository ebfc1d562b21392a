// Memory of a device of the host, shared in the ways of a GPU's: by address within a process, by a
// descriptor (of a memfd) between processes. Internal to device_host.cpp.
//
// Threads: any, one at a time enters.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "comm/base/error.h"
#include "comm/base/fork_guard.h"
#include "cuda/device/device.h"

namespace dpcore {

class HostMemory {
 public:
  std::byte* allocate(size_t bytes) {
    return static_cast<std::byte*>(::operator new(bytes, kAlignment));
  }
  std::byte* allocate_shared(size_t bytes, MemoryKind kind) {
    if (kind == MemoryKind::address) {
      return allocate(bytes);
    }
    if (kind == MemoryKind::ipc) {
      throw Unsupported("devices of the host have no ipc");
    }
    Descriptor descriptor(memfd_create("dpcore-device", MFD_CLOEXEC));
    if (!descriptor) {
      failed("memfd_create");
    }
    if (ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) {
      failed("ftruncate");
    }
    const int fd = descriptor.get();
    return place(fd, bytes, std::move(descriptor));
  }
  void release(std::byte* memory) {
    if (!take_away(memory)) {
      ::operator delete(memory, kAlignment);
    }
  }

  MemoryHandle share(std::byte* memory) {
    MemoryHandle handle;
    handle.process = process_mark();
    handle.address = reinterpret_cast<uint64_t>(memory);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = mapped_.find(memory);
    if (found == mapped_.end()) {
      return handle;
    }
    handle.kind = MemoryKind::descriptor;
    handle.bytes = found->second.bytes;
    handle.descriptor = fcntl(found->second.descriptor.get(), F_DUPFD_CLOEXEC, 0);
    if (handle.descriptor < 0) {
      failed("F_DUPFD_CLOEXEC");
    }
    return handle;
  }
  std::byte* map(const MemoryHandle& handle) {
    if (handle.process == process_mark()) {
      return reinterpret_cast<std::byte*>(handle.address);
    }
    if (handle.kind != MemoryKind::descriptor) {
      throw Unsupported("devices of the host share memory by address within a process only");
    }
    return place(handle.descriptor, handle.bytes, Descriptor());
  }
  // What has an address of another rank of this process is not in the list.
  void forget(std::byte* memory) { take_away(memory); }

 private:
  static constexpr std::align_val_t kAlignment{256};  // what cudaMalloc promises

  struct Mapping {
    Descriptor descriptor;  // of the own ones
    size_t bytes = 0;
  };

  [[noreturn]] static void failed(const char* call) {
    throw Error(std::string("host: ") + call + ": " + std::strerror(errno));
  }

  std::byte* place(int fd, size_t bytes, Descriptor own) {
    void* memory =
        mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
      failed("mmap");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    mapped_[static_cast<std::byte*>(memory)] = {std::move(own), bytes};
    return static_cast<std::byte*>(memory);
  }
  bool take_away(std::byte* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = mapped_.find(memory);
    if (found == mapped_.end()) {
      return false;
    }
    munmap(memory, std::max<size_t>(found->second.bytes, 1));
    mapped_.erase(found);
    return true;
  }

  std::mutex mutex_;
  std::map<std::byte*, Mapping> mapped_;
};

}  // namespace dpcore
