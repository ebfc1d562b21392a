// See memory_host.h.
#include "cuda/device/memory_host.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#include "comm/base/error.h"
#include "cuda/device/process_mark.h"

namespace dpcore {
namespace {

constexpr std::align_val_t kAlignment{256};  // what cudaMalloc promises

[[noreturn]] void failed(const char* call) {
  throw Error(std::string("host: ") + call + ": " + std::strerror(errno));
}

}  // namespace

std::byte* HostMemory::allocate(size_t bytes) {
  return static_cast<std::byte*>(::operator new(bytes, kAlignment));
}

std::byte* HostMemory::allocate_shared(size_t bytes, MemoryKind kind) {
  if (kind == MemoryKind::address) {
    return allocate(bytes);
  }
  if (kind == MemoryKind::ipc) {
    throw Unsupported("devices of the host have no ipc");
  }
  const int descriptor = memfd_create("dpcore-device", MFD_CLOEXEC);
  if (descriptor < 0) {
    failed("memfd_create");
  }
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    close(descriptor);
    failed("ftruncate");
  }
  return place(descriptor, bytes, true);
}

std::byte* HostMemory::place(int descriptor, size_t bytes, bool own) {
  void* memory =
      mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    if (own) {
      close(descriptor);
    }
    failed("mmap");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  mapped_[static_cast<std::byte*>(memory)] = {own ? descriptor : -1, bytes};
  return static_cast<std::byte*>(memory);
}

bool HostMemory::take_away(std::byte* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = mapped_.find(memory);
  if (found == mapped_.end()) {
    return false;
  }
  munmap(memory, std::max<size_t>(found->second.bytes, 1));
  if (found->second.descriptor >= 0) {
    close(found->second.descriptor);
  }
  mapped_.erase(found);
  return true;
}

void HostMemory::release(std::byte* memory) {
  if (!take_away(memory)) {
    ::operator delete(memory, kAlignment);
  }
}

MemoryHandle HostMemory::share(std::byte* memory) {
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
  handle.descriptor = fcntl(found->second.descriptor, F_DUPFD_CLOEXEC, 0);
  if (handle.descriptor < 0) {
    failed("F_DUPFD_CLOEXEC");
  }
  return handle;
}

std::byte* HostMemory::map(const MemoryHandle& handle) {
  if (handle.process == process_mark()) {
    return reinterpret_cast<std::byte*>(handle.address);
  }
  if (handle.kind != MemoryKind::descriptor) {
    throw Unsupported("devices of the host share memory by address within a process only");
  }
  return place(handle.descriptor, handle.bytes, false);
}

void HostMemory::forget(std::byte* memory) {
  // What has an address of another rank of this process is not in the list.
  take_away(memory);
}

}  // namespace dpcore
