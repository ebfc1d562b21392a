// Calls that only the driver has. They are asked for by name at run time, so nothing is linked
// against libcuda and the module loads where there is none; cuda.h gives types alone.
//
// Errors of the runtime stay behind in the thread until somebody asks for the last one, which is
// how a launch is checked: whoever handles one by itself takes it away (ignore).
//
// Internal to the .cu files. The table is filled once per process and never changes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "comm/base/error.h"

namespace dpcore {

struct Driver {
  decltype(&cuStreamBatchMemOp) stream_batch = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
  decltype(&cuDeviceGetAttribute) attribute = nullptr;
  // What calls of a thread are for:
  decltype(&cuCtxGetCurrent) current_context = nullptr;
  decltype(&cuCtxSetCurrent) make_context_current = nullptr;
  // Physical memory and addresses apart:
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) unreserve = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) to_descriptor = nullptr;
  decltype(&cuMemImportFromShareableHandle) from_descriptor = nullptr;

  // Throws Unsupported where the driver is too old.
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  // What has nobody to tell, and is not to be taken for an error of the next call.
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
  Driver() {
    find("cuStreamBatchMemOp", stream_batch);
    find("cuMemGetAddressRange", address_range);
    find("cuDeviceGetAttribute", attribute);
    find("cuCtxGetCurrent", current_context);
    find("cuCtxSetCurrent", make_context_current);
    find("cuMemGetAllocationGranularity", granularity);
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", unreserve);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
    find("cuMemExportToShareableHandle", to_descriptor);
    find("cuMemImportFromShareableHandle", from_descriptor);
  }

  template <class Function>
  static void find(const char* name, Function& function) {
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
    function = reinterpret_cast<Function>(address);
  }
};

}  // namespace dpcore
