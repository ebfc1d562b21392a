// What the runtime allocates, copies, registers, and hands to other processes as ipc.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

// A handle leads to the beginning of what was allocated, which is rarely what was asked for.
constexpr size_t kBefore = 512;

struct Allocation {
  int descriptor = -1;
  size_t bytes = 0;  // with what lies before
  int device = 0;
};
struct Opened {
  std::byte* base = nullptr;
  size_t bytes = 0;
  int users = 0;
};
struct Registered {
  size_t bytes = 0;
  std::byte* alias = nullptr;  // as devices see it
};
struct IpcHandle {
  int process;
  int descriptor;
  size_t bytes;
};
static_assert(sizeof(IpcHandle) <= sizeof(cudaIpcMemHandle_t));

struct Memory {
  std::mutex mutex;
  std::map<std::byte*, Allocation> allocated;
  std::map<std::pair<int, int>, Opened> opened;  // by process and descriptor
  std::map<std::byte*, Registered> registered;
};

Memory& memory() {
  static auto* it = new Memory;
  return *it;
}

void let_go(std::byte* pointer, const Allocation& allocation) {
  munmap(pointer - kBefore, allocation.bytes);
  close(allocation.descriptor);
}

// Two addresses for one word are two words for the thread sanitizer.
std::byte* alias_of([[maybe_unused]] void* pages, [[maybe_unused]] size_t bytes) {
#if !defined(__SANITIZE_THREAD__)
  void* alias = mremap(pages, 0, bytes, MREMAP_MAYMOVE);
  if (alias != MAP_FAILED) {
    return static_cast<std::byte*>(alias);
  }
#endif
  return static_cast<std::byte*>(pages);
}

cudaError_t allocate(void** pointer, size_t bytes) {
  Allocation allocation;
  allocation.bytes = bytes + kBefore;
  allocation.descriptor = make_device_memory(allocation.bytes);
  allocation.device = current_device_or_first();
  std::byte* base = map_device_memory(allocation.descriptor, allocation.bytes);
  let_streams_touch(base, allocation.bytes);
  *pointer = base + kBefore;
  const std::lock_guard<std::mutex> lock(memory().mutex);
  memory().allocated[base + kBefore] = allocation;
  return cudaSuccess;
}

bool take(void* pointer, Allocation& allocation) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().allocated.find(static_cast<std::byte*>(pointer));
  if (found == memory().allocated.end()) {
    return false;
  }
  allocation = found->second;
  memory().allocated.erase(found);
  return true;
}

}  // namespace

int make_device_memory(size_t bytes) {
  const int descriptor = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    misuse("memfd: " + std::string(std::strerror(errno)));
  }
  return descriptor;
}

std::byte* map_device_memory(int descriptor, size_t bytes, std::byte* at) {
  const int flags = MAP_SHARED | (at != nullptr ? MAP_FIXED : 0);
  void* mapped = mmap(at, bytes, PROT_NONE, flags, descriptor, 0);
  if (mapped == MAP_FAILED) {
    misuse("mmap: " + std::string(std::strerror(errno)));
  }
  return static_cast<std::byte*>(mapped);
}

std::string memory_left() {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  std::string text;
  for (const auto& [at, allocation] : memory().allocated) {
    text += "cudaMalloc of " + std::to_string(allocation.bytes - kBefore) + " bytes\n";
  }
  for (const auto& [from, opened] : memory().opened) {
    text += "ipc of process " + std::to_string(from.first) + "\n";
  }
  for (const auto& [at, pages] : memory().registered) {
    text += "cudaHostRegister of " + std::to_string(pages.bytes) + " bytes\n";
  }
  return text;
}

void write(void* to, const void* from, size_t bytes) {
  if (cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
    misuse("write");
  }
}
void read(void* to, const void* from, size_t bytes) {
  if (cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost) != cudaSuccess) {
    misuse("read");
  }
}

// The driver's: where the allocation begins that an address lies in.
CUresult address_range(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  FAKE_DRIVER_CALL("cuMemGetAddressRange");
  const std::lock_guard<std::mutex> lock(memory().mutex);
  auto* at = reinterpret_cast<std::byte*>(address);
  auto next = memory().allocated.upper_bound(at);
  if (next == memory().allocated.begin()) {
    return CUDA_ERROR_NOT_FOUND;
  }
  --next;
  if (at >= next->first - kBefore + next->second.bytes) {
    return CUDA_ERROR_NOT_FOUND;
  }
  *base = reinterpret_cast<CUdeviceptr>(next->first - kBefore);
  *bytes = next->second.bytes;
  return CUDA_SUCCESS;
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  FAKE_RUNTIME_CALL("cudaMalloc");
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  return allocate(pointer, bytes);
}
// Waits for the device.
cudaError_t cudaFree(void* pointer) {
  FAKE_RUNTIME_CALL("cudaFree");
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  Allocation allocation;
  if (!take(pointer, allocation)) {
    return answer(cudaErrorInvalidValue);
  }
  wait_for_device(allocation.device);
  let_go(static_cast<std::byte*>(pointer), allocation);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  FAKE_RUNTIME_CALL("cudaFreeAsync");
  Allocation allocation;
  if (!take(pointer, allocation)) {
    return answer(cudaErrorInvalidValue);
  }
  enqueue(stream, [=] { let_go(static_cast<std::byte*>(pointer), allocation); });
  return cudaSuccess;
}
// From pageable memory or into it, both wait: that is how ordinary programs call it.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  FAKE_RUNTIME_CALL("cudaMemcpy");
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  enqueue(nullptr, [=] { std::memcpy(to, from, bytes); });
  wait_for_stream(nullptr);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  FAKE_RUNTIME_CALL("cudaMemcpyAsync");
  if (kind == cudaMemcpyHostToDevice) {  // of ordinary memory, which is free again at once
    const auto* begin = static_cast<const std::byte*>(from);
    enqueue(stream, [to, taken = std::vector<std::byte>(begin, begin + bytes)] {
      std::memcpy(to, taken.data(), taken.size());
    });
    return cudaSuccess;
  }
  if (kind != cudaMemcpyDeviceToDevice) {
    return answer(cudaErrorInvalidMemcpyDirection);
  }
  enqueue(stream, [=] { std::memmove(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pages, size_t bytes, unsigned flags) {
  FAKE_RUNTIME_CALL("cudaHostRegister");
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  if ((flags & ~(cudaHostRegisterMapped | cudaHostRegisterPortable)) != 0 || bytes == 0) {
    return answer(cudaErrorInvalidValue);
  }
  const std::lock_guard<std::mutex> lock(memory().mutex);
  auto* at = static_cast<std::byte*>(pages);
  for (const auto& [begin, range] : memory().registered) {
    if (at < begin + range.bytes && begin < at + bytes) {
      return answer(cudaErrorHostMemoryAlreadyRegistered);
    }
  }
  memory().registered[at] = {bytes, alias_of(pages, bytes)};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pages) {
  FAKE_RUNTIME_CALL("cudaHostUnregister");
  needs_context("cudaHostUnregister");
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  for (int device = 0; device < device_count(); ++device) {
    wait_for_device(device);
  }
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().registered.find(static_cast<std::byte*>(pages));
  if (found == memory().registered.end()) {
    return answer(cudaErrorHostMemoryNotRegistered);
  }
  if (found->second.alias != pages) {
    munmap(found->second.alias, found->second.bytes);
  }
  memory().registered.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** pointer, void* pages, unsigned flags) {
  FAKE_RUNTIME_CALL("cudaHostGetDevicePointer");
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().registered.find(static_cast<std::byte*>(pages));
  if (found == memory().registered.end() || flags != 0) {
    return answer(cudaErrorInvalidValue);
  }
  *pointer = found->second.alias;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  FAKE_RUNTIME_CALL("cudaIpcGetMemHandle");
  if (!ipc_allowed()) {
    return answer(cudaErrorNotSupported);
  }
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().allocated.find(static_cast<std::byte*>(pointer));
  if (found == memory().allocated.end()) {
    return answer(cudaErrorInvalidValue);
  }
  const IpcHandle own{getpid(), found->second.descriptor, found->second.bytes};
  std::memcpy(handle, &own, sizeof(own));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  FAKE_RUNTIME_CALL("cudaIpcOpenMemHandle");
  IpcHandle of{};
  std::memcpy(&of, &handle, sizeof(of));
  if (of.process == getpid()) {
    return answer(cudaErrorDeviceUninitialized);
  }
  if (flags != cudaIpcMemLazyEnablePeerAccess) {
    return answer(cudaErrorInvalidValue);
  }
  const std::lock_guard<std::mutex> lock(memory().mutex);
  Opened& opened = memory().opened[{of.process, of.descriptor}];
  if (opened.users++ == 0) {
    const std::string path =
        "/proc/" + std::to_string(of.process) + "/fd/" + std::to_string(of.descriptor);
    const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
      misuse(path + ": the owner has not kept its memory");
    }
    opened.bytes = of.bytes;
    opened.base = map_device_memory(descriptor, of.bytes);
    close(descriptor);
    let_streams_touch(opened.base, of.bytes);
  }
  *pointer = opened.base;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  FAKE_RUNTIME_CALL("cudaIpcCloseMemHandle");
  const std::lock_guard<std::mutex> lock(memory().mutex);
  for (auto it = memory().opened.begin(); it != memory().opened.end(); ++it) {
    if (it->second.base != pointer) {
      continue;
    }
    if (--it->second.users == 0) {
      munmap(it->second.base, it->second.bytes);
      memory().opened.erase(it);
    }
    return cudaSuccess;
  }
  return answer(cudaErrorInvalidValue);
}

}  // extern "C"
