// Functions of the driver that are found by name (driver.cpp).
#pragma once

#include "fake_cuda.h"

namespace fake_cuda {

CUresult address_range(CUdeviceptr* base, size_t* bytes, CUdeviceptr address);
CUresult granularity(size_t* unit, const CUmemAllocationProp* wanted,
                     CUmemAllocationGranularity_flags option);
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes,
                const CUmemAllocationProp* wanted, unsigned long long flags);
CUresult release(CUmemGenericAllocationHandle handle);
CUresult reserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr wish,
                 unsigned long long flags);
CUresult unreserve(CUdeviceptr address, size_t bytes);
CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags);
CUresult unmap(CUdeviceptr address, size_t bytes);
CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count);
CUresult to_descriptor(void* descriptor, CUmemGenericAllocationHandle handle,
                       CUmemAllocationHandleType type, unsigned long long flags);
CUresult from_descriptor(CUmemGenericAllocationHandle* handle, void* descriptor,
                         CUmemAllocationHandleType type);

}  // namespace fake_cuda
