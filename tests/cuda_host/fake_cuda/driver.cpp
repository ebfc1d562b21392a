// The driver's functions by name, the context of a thread, and stream memory operations.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "fake_cuda.h"
#include "physical.h"

namespace fake_cuda {
namespace {

constexpr unsigned kMostOperations = 256;

// A context is its device's number plus one.
CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1));
}

CUresult current_context(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}
CUresult make_context_current(CUcontext context) {
  make_current(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUdevice_attribute which, CUdevice device) {
  if (device < 0 || device >= device_count()) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      *value = 1;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

void wait_until(uint32_t* flag, uint32_t number) {
  const std::atomic_ref<uint32_t> word(*flag);
  while (static_cast<int32_t>(word.load(std::memory_order_acquire) - number) < 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

CUresult stream_batch(CUstream stream, unsigned count, CUstreamBatchMemOpParams* items,
                      unsigned flags) {
  FAKE_DRIVER_CALL("cuStreamBatchMemOp");
  if (current_device() < 0) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (count == 0 || count > kMostOperations || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!is_ours(stream)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (is_captured(stream)) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  for (unsigned i = 0; i < count; ++i) {
    const CUstreamBatchMemOpParams item = items[i];
    if (item.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) {
      if (item.waitValue.flags != CU_STREAM_WAIT_VALUE_GEQ) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      auto* flag = reinterpret_cast<uint32_t*>(item.waitValue.address);
      enqueue(stream, [flag, item] { wait_until(flag, item.waitValue.value); });
    } else if (item.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      if (item.writeValue.flags != CU_STREAM_WRITE_VALUE_DEFAULT) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      auto* flag = reinterpret_cast<uint32_t*>(item.writeValue.address);
      enqueue(stream, [flag, item] {
        std::atomic_ref<uint32_t>(*flag).store(item.writeValue.value, std::memory_order_release);
      });
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& functions() {
  static const auto* table = new std::map<std::string, void*>{
      {"cuStreamBatchMemOp", reinterpret_cast<void*>(&stream_batch)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&address_range)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&attribute)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&current_context)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(&make_context_current)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity)},
      {"cuMemCreate", reinterpret_cast<void*>(&create)},
      {"cuMemRelease", reinterpret_cast<void*>(&release)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&unreserve)},
      {"cuMemMap", reinterpret_cast<void*>(&map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&to_descriptor)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&from_descriptor)},
  };
  return *table;
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** address,
                                                        unsigned version, unsigned long long flags,
                                                        cudaDriverEntryPointQueryResult* found) {
  FAKE_RUNTIME_CALL("cudaGetDriverEntryPointByVersion");
  if (version < 12000 || flags != cudaEnableDefault) {
    return answer(cudaErrorInvalidValue);
  }
  const auto function = functions().find(name);
  *found = function == functions().end() ? cudaDriverEntryPointSymbolNotFound
                                         : cudaDriverEntryPointSuccess;
  *address = function == functions().end() ? nullptr : function->second;
  return cudaSuccess;
}
