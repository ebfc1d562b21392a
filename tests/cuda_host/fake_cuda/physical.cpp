// Physical memory and addresses apart, as the driver has them (cuMem...).
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>

#include "fake_cuda.h"
#include "physical.h"

namespace fake_cuda {
namespace {

struct Physical {
  int descriptor = -1;
  size_t bytes = 0;
  bool can_be_shared = false;
};
struct Range {
  size_t bytes = 0;
  bool is_mapped = false;
};

struct Tables {
  std::mutex mutex;
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  std::map<CUdeviceptr, Range> ranges;
  CUmemGenericAllocationHandle next = 1;
};

Tables& tables() {
  static auto* it = new Tables;
  return *it;
}

bool is_shared_memory_of_a_device(const CUmemAllocationProp& wanted) {
  return wanted.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         wanted.location.type == CU_MEM_LOCATION_TYPE_DEVICE && wanted.location.id >= 0 &&
         wanted.location.id < device_count();
}

CUmemGenericAllocationHandle added(const Physical& physical) {
  const CUmemGenericAllocationHandle handle = tables().next++;
  tables().physical[handle] = physical;
  return handle;
}

std::byte* pages(CUdeviceptr address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

std::string physical_left() {
  const std::lock_guard<std::mutex> lock(tables().mutex);
  std::string text;
  for (const auto& [handle, physical] : tables().physical) {
    text += "cuMemCreate of " + std::to_string(physical.bytes) + " bytes\n";
  }
  for (const auto& [at, range] : tables().ranges) {
    text += "cuMemAddressReserve of " + std::to_string(range.bytes) + " bytes\n";
  }
  return text;
}

CUresult granularity(size_t* unit, const CUmemAllocationProp* wanted,
                     CUmemAllocationGranularity_flags) {
  FAKE_DRIVER_CALL("cuMemGetAllocationGranularity");
  if (!is_shared_memory_of_a_device(*wanted)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *unit = kGranularity;
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes,
                const CUmemAllocationProp* wanted, unsigned long long flags) {
  FAKE_DRIVER_CALL("cuMemCreate");
  if (bytes == 0 || bytes % kGranularity != 0 || flags != 0 ||
      !is_shared_memory_of_a_device(*wanted)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool shared = wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (shared && !descriptors_allowed()) {
    return CUDA_ERROR_NOT_PERMITTED;
  }
  const std::lock_guard<std::mutex> lock(tables().mutex);
  *handle = added({make_device_memory(bytes), bytes, shared});
  return CUDA_SUCCESS;
}

// What is mapped stays; the descriptor goes.
CUresult release(CUmemGenericAllocationHandle handle) {
  FAKE_DRIVER_CALL("cuMemRelease");
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto found = tables().physical.find(handle);
  if (found == tables().physical.end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  close(found->second.descriptor);
  tables().physical.erase(found);
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr wish,
                 unsigned long long flags) {
  FAKE_DRIVER_CALL("cuMemAddressReserve");
  if (bytes == 0 || bytes % kGranularity != 0 || alignment != 0 || wish != 0 || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *address = reinterpret_cast<CUdeviceptr>(range);
  const std::lock_guard<std::mutex> lock(tables().mutex);
  tables().ranges[*address] = {bytes, false};
  return CUDA_SUCCESS;
}

CUresult unreserve(CUdeviceptr address, size_t bytes) {
  FAKE_DRIVER_CALL("cuMemAddressFree");
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto found = tables().ranges.find(address);
  if (found == tables().ranges.end() || found->second.bytes != bytes || found->second.is_mapped) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(pages(address), bytes);
  tables().ranges.erase(found);
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags) {
  FAKE_DRIVER_CALL("cuMemMap");
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto range = tables().ranges.find(address);
  const auto physical = tables().physical.find(handle);
  if (range == tables().ranges.end() || physical == tables().physical.end() || offset != 0 ||
      flags != 0 || range->second.is_mapped || bytes != range->second.bytes ||
      bytes > physical->second.bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  map_device_memory(physical->second.descriptor, bytes, pages(address));
  range->second.is_mapped = true;
  return CUDA_SUCCESS;
}

// Nobody is waited for: what still runs there falls.
CUresult unmap(CUdeviceptr address, size_t bytes) {
  FAKE_DRIVER_CALL("cuMemUnmap");
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto range = tables().ranges.find(address);
  if (range == tables().ranges.end() || !range->second.is_mapped || bytes != range->second.bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  mmap(pages(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
  range->second.is_mapped = false;
  return CUDA_SUCCESS;
}

// Without it nobody can touch what is mapped.
CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                    size_t count) {
  FAKE_DRIVER_CALL("cuMemSetAccess");
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto range = tables().ranges.find(address);
  if (range == tables().ranges.end() || !range->second.is_mapped || bytes != range->second.bytes ||
      count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      access->location.id < 0 || access->location.id >= device_count() ||
      access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  let_streams_touch(pages(address), bytes);
  return CUDA_SUCCESS;
}

CUresult to_descriptor(void* descriptor, CUmemGenericAllocationHandle handle,
                       CUmemAllocationHandleType type, unsigned long long flags) {
  FAKE_DRIVER_CALL("cuMemExportToShareableHandle");
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto found = tables().physical.find(handle);
  if (found == tables().physical.end() || flags != 0 || !found->second.can_be_shared ||
      type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *static_cast<int*>(descriptor) = fcntl(found->second.descriptor, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

// The descriptor stays the caller's.
CUresult from_descriptor(CUmemGenericAllocationHandle* handle, void* descriptor,
                         CUmemAllocationHandleType type) {
  FAKE_DRIVER_CALL("cuMemImportFromShareableHandle");
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int from = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  struct stat about{};
  if (fstat(from, &about) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::lock_guard<std::mutex> lock(tables().mutex);
  *handle = added({fcntl(from, F_DUPFD_CLOEXEC, 0), static_cast<size_t>(about.st_size), true});
  return CUDA_SUCCESS;
}

}  // namespace fake_cuda
