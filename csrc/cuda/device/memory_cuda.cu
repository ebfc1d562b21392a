// See memory_cuda.cuh.
#include "cuda/device/memory_cuda.cuh"

#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "cuda/kernels/driver.cuh"

namespace dpcore {
namespace {

void check(cudaError_t error, const std::string& call) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // told here
    throw Error(call + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
  }
}

CUmemLocation location_of(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

// A handle leads to the beginning of the allocation that the memory is a part of.
size_t offset_in_allocation(unsigned long long address) {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  Driver::check(Driver::get().address_range(&base, &bytes, address), "cuMemGetAddressRange");
  return address - base;
}

CUmemAllocationProp shared_on(int device) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  wanted.location = location_of(device);
  return wanted;
}

// Tried, since in some containers the driver refuses what the attributes promise.
bool gives_descriptors(int device) {
  const Driver& driver = Driver::get();
  const CUmemAllocationProp wanted = shared_on(device);
  size_t unit = 0;
  CUmemGenericAllocationHandle handle = 0;
  if (driver.granularity(&unit, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS ||
      driver.create(&handle, unit, &wanted, 0) != CUDA_SUCCESS) {
    return false;
  }
  int descriptor = -1;
  const bool gives =
      driver.to_descriptor(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
      CUDA_SUCCESS;
  if (gives) {
    close(descriptor);
  }
  driver.release(handle);
  return gives;
}

bool gives_ipc_handles() {
  void* memory = nullptr;
  cudaIpcMemHandle_t handle;
  const bool gives =
      cudaMalloc(&memory, 1) == cudaSuccess && cudaIpcGetMemHandle(&handle, memory) == cudaSuccess;
  Driver::ignore(cudaFree(memory));
  cudaGetLastError();  // an earlier failure is not an error of the next call
  return gives;
}

}  // namespace

bool CudaMemory::has_attribute(int attribute) const {
  int value = 0;
  return Driver::get().attribute(&value, static_cast<CUdevice_attribute>(attribute), device_) ==
             CUDA_SUCCESS &&
         value != 0;
}

MemorySupport CudaMemory::support() const {
  return {process_mark(),
          has_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
              has_attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) &&
              gives_descriptors(device_),
          has_attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) && gives_ipc_handles()};
}

std::byte* CudaMemory::allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), name() + ": cudaMalloc of " + std::to_string(bytes) + " bytes");
  return static_cast<std::byte*>(memory);
}

std::byte* CudaMemory::allocate_shared(size_t bytes, MemoryKind kind) {
  if (kind != MemoryKind::descriptor) {
    std::byte* memory = allocate(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kind == MemoryKind::ipc) {
      by_ipc_.insert(memory);
    }
    return memory;
  }
  const Driver& driver = Driver::get();
  const CUmemAllocationProp wanted = shared_on(device_);
  size_t unit = 0;
  Driver::check(driver.granularity(&unit, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                "cuMemGetAllocationGranularity");
  Physical physical;
  physical.bytes = (bytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  Driver::check(driver.create(&handle, physical.bytes, &wanted, 0),
                name() + ": cuMemCreate of " + std::to_string(physical.bytes) + " bytes");
  physical.handle = handle;
  return place(physical);
}

// Gives physical memory an address here. Takes it over.
std::byte* CudaMemory::place(const Physical& physical) {
  const Driver& driver = Driver::get();
  CUdeviceptr address = 0;
  bool is_mapped = false;
  try {
    Driver::check(driver.reserve(&address, physical.bytes, 0, 0, 0), "cuMemAddressReserve");
    Driver::check(driver.map(address, physical.bytes, 0, physical.handle, 0), "cuMemMap");
    is_mapped = true;
    allow_access(address, physical.bytes);
  } catch (const Error&) {
    if (is_mapped) {
      driver.unmap(address, physical.bytes);
    }
    if (address != 0) {
      driver.unreserve(address, physical.bytes);
    }
    driver.release(physical.handle);
    throw;
  }
  auto* memory = reinterpret_cast<std::byte*>(address);
  const std::lock_guard<std::mutex> lock(mutex_);
  physical_[memory] = physical;
  return memory;
}

void CudaMemory::take_away(std::byte* memory, const Physical& physical) {
  const Driver& driver = Driver::get();
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  driver.unmap(address, physical.bytes);
  driver.unreserve(address, physical.bytes);
  driver.release(physical.handle);
}

// For this device, also to memory that another device of the process has mapped.
void CudaMemory::allow_access(unsigned long long address, size_t bytes) {
  CUmemAccessDesc access{};
  access.location = location_of(device_);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  Driver::check(Driver::get().set_access(address, bytes, &access, 1),
                name() + ": cuMemSetAccess to a rank's memory");
}

void CudaMemory::stop_freeing() {
  if (freeing_ != nullptr) {
    Driver::ignore(cudaStreamDestroy(std::exchange(freeing_, nullptr)));
  }
}

void CudaMemory::release(std::byte* memory, bool is_idle) {
  // cudaFree waits for the device, cuMemUnmap for nothing.
  if (!is_idle) {
    Driver::ignore(cudaDeviceSynchronize());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = physical_.find(memory);
  if (found != physical_.end()) {
    take_away(memory, found->second);
    physical_.erase(found);
  } else if (by_ipc_.erase(memory) > 0 || !free_without_waiting(memory)) {
    Driver::ignore(cudaFree(memory));
  }
}

// In the order of a stream that nothing else is in. False where the device can't.
bool CudaMemory::free_without_waiting(std::byte* memory) {
  if (!has_attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)) {
    return false;
  }
  cudaError_t error = cudaSuccess;
  if (freeing_ == nullptr) {
    error = cudaStreamCreateWithFlags(&freeing_, cudaStreamNonBlocking);
  }
  if (error == cudaSuccess) {
    error = cudaFreeAsync(memory, freeing_);
  }
  Driver::ignore(error);
  return error == cudaSuccess;
}

MemoryHandle CudaMemory::share(std::byte* memory) {
  MemoryHandle handle;
  handle.process = process_mark();
  handle.device = device_;
  handle.address = reinterpret_cast<uint64_t>(memory);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = physical_.find(memory);
  if (found != physical_.end()) {
    handle.kind = MemoryKind::descriptor;
    handle.bytes = found->second.bytes;
    Driver::check(Driver::get().to_descriptor(&handle.descriptor, found->second.handle,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                  "cuMemExportToShareableHandle");
    return handle;
  }
  if (!by_ipc_.contains(memory)) {
    return handle;
  }
  cudaIpcMemHandle_t ipc{};
  static_assert(sizeof(ipc) == sizeof(handle.handle));
  check(cudaIpcGetMemHandle(&ipc, memory), name() + ": cudaIpcGetMemHandle");
  handle.kind = MemoryKind::ipc;
  handle.bytes = offset_in_allocation(handle.address);
  std::memcpy(handle.handle, &ipc, sizeof(ipc));
  return handle;
}

std::byte* CudaMemory::map(const MemoryHandle& handle) {
  auto* there = reinterpret_cast<std::byte*>(handle.address);
  if (handle.process == process_mark()) {
    if (handle.device == device_) {
      return there;
    }
    if (handle.kind == MemoryKind::descriptor) {
      allow_access(handle.address, handle.bytes);
    } else {
      reach(handle.device);
    }
    return there;
  }
  if (handle.kind == MemoryKind::descriptor) {
    CUmemGenericAllocationHandle physical = 0;
    Driver::check(Driver::get().from_descriptor(
                      &physical, reinterpret_cast<void*>(static_cast<intptr_t>(handle.descriptor)),
                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                  "cuMemImportFromShareableHandle");
    return place({physical, handle.bytes});
  }
  if (handle.kind == MemoryKind::address) {
    throw Unsupported(name() + ": a rank's memory has no handle for other processes");
  }
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, handle.handle, sizeof(ipc));
  void* base = nullptr;
  check(cudaIpcOpenMemHandle(&base, ipc, cudaIpcMemLazyEnablePeerAccess),
        name() + ": cudaIpcOpenMemHandle");
  auto* memory = static_cast<std::byte*>(base) + handle.bytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  opened_.emplace(memory, base);
  return memory;
}

void CudaMemory::forget(std::byte* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto opened = opened_.find(memory);
  if (opened != opened_.end()) {
    Driver::ignore(cudaIpcCloseMemHandle(opened->second));
    opened_.erase(opened);
    return;
  }
  // What has an address of another rank of this process is not in the list.
  const auto mapped = physical_.find(memory);
  if (mapped == physical_.end()) {
    return;
  }
  take_away(memory, mapped->second);
  physical_.erase(mapped);
}

// Devices of one process reach each other's memory when they are told to.
void CudaMemory::reach(int other) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error == cudaSuccess) {
    return;
  }
  cudaGetLastError();
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    return;
  }
  throw Unsupported(name() + " can't reach the memory of cuda:" + std::to_string(other) + " (" +
                    cudaGetErrorString(error) + "): use backend='nccl'");
}

}  // namespace dpcore
