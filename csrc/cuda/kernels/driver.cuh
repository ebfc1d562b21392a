// Calls that only the driver has. They are asked for by name at run time, so nothing is linked
// against libcuda and the module loads where there is none; cuda.h gives types alone.
//
// Errors of the runtime stay behind in the thread until a caller asks for the last one, which is
// how a launch is checked: code that handles one by itself takes it away (ignore).
//
// Internal to the .cu files. The table is filled once per process and never changes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "comm/base/error.h"

namespace dpcore {

struct Driver {
#define DPCORE_DRIVER_CALL(member, name) decltype(&name) member = find<decltype(&name)>(#name)
  DPCORE_DRIVER_CALL(stream_batch, cuStreamBatchMemOp);
  DPCORE_DRIVER_CALL(address_range, cuMemGetAddressRange);
  DPCORE_DRIVER_CALL(attribute, cuDeviceGetAttribute);
  // What calls of a thread are for:
  DPCORE_DRIVER_CALL(current_context, cuCtxGetCurrent);
  DPCORE_DRIVER_CALL(make_context_current, cuCtxSetCurrent);
  // Physical memory and addresses apart:
  DPCORE_DRIVER_CALL(granularity, cuMemGetAllocationGranularity);
  DPCORE_DRIVER_CALL(create, cuMemCreate);
  DPCORE_DRIVER_CALL(release, cuMemRelease);
  DPCORE_DRIVER_CALL(reserve, cuMemAddressReserve);
  DPCORE_DRIVER_CALL(unreserve, cuMemAddressFree);
  DPCORE_DRIVER_CALL(map, cuMemMap);
  DPCORE_DRIVER_CALL(unmap, cuMemUnmap);
  DPCORE_DRIVER_CALL(set_access, cuMemSetAccess);
  DPCORE_DRIVER_CALL(to_descriptor, cuMemExportToShareableHandle);
  DPCORE_DRIVER_CALL(from_descriptor, cuMemImportFromShareableHandle);
#undef DPCORE_DRIVER_CALL

  // Throws Unsupported where the driver is too old.
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  // An error that cannot be reported, and is not to be taken for an error of the next call.
  static void ignore(cudaError_t error) {
    if (error != cudaSuccess) {
      cudaGetLastError();
    }
  }

  static void check(CUresult result, const std::string& call) {
    if (result != CUDA_SUCCESS) {
      throw Error(call + " answers CUresult " + std::to_string(static_cast<int>(result)));
    }
  }

 private:
  Driver() = default;

  template <class Function>
  static Function find(const char* name) {
    // As the functions were in 12.0, whose signatures are those of the header. (The call that asks
    // for a version came with the toolkit of 12.5, which is what building takes.)
    constexpr unsigned kVersion = 12000;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      throw Unsupported(std::string("the NVIDIA driver lacks ") + name +
                        ": install one for CUDA 12.1 or newer");  // whose kernels take 24 KiB
    }
    return reinterpret_cast<Function>(address);
  }
};

}  // namespace dpcore
