// Calls that only the driver has. They are asked for by name at run time, so nothing is linked
// against libcuda and the module loads where there is none; cuda.h gives types alone.
//
// Internal to the .cu files. The table is filled once per process and never changes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "comm/error.h"

namespace dpcore {

struct Driver {
  decltype(&cuStreamBatchMemOp) stream_batch = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
  decltype(&cuDeviceGetAttribute) attribute = nullptr;
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
    constexpr unsigned kVersion = 12000;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw Unsupported(std::string("the NVIDIA driver lacks ") + name +
                        ": install one for CUDA 12.0 or newer");
    }
    function = reinterpret_cast<Function>(address);
  }
};

}  // namespace dpcore
