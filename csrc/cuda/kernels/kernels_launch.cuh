// How a reduction becomes a kernel, for the files that hold one policy's kernels each. Two files,
// as each policy has an instance for every type and they compile side by side.
//
// Internal to kernels*.cu.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "comm/base/error.h"
#include "cuda/kernels/driver.cuh"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/reduce_table.h"

namespace dpcore {

inline constexpr int kThreads = 256;

// The threads of a GPU as the workers of share_sync.h.
struct GpuBlock {
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }
  __device__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ int blocks() const { return static_cast<int>(gridDim.x); }
  __device__ bool all(bool says) const { return __syncthreads_and(says ? 1 : 0) != 0; }
};

template <class Reducer, class Policy>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ ReduceShares job,
                                                          const __grid_constant__ ShareSync sync) {
  GpuBlock block;
  element::run_share<Reducer, Policy>(job, sync, block);
}

template <class Policy>
struct DeviceKernel {
  using Kernel = void (*)(const ReduceShares, const ShareSync);
  template <class Reducer>
  static Kernel make() {
    return &reduce_kernel<Reducer, Policy>;
  }
};

inline void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw Error(std::string(what) + " was not launched: " + cudaGetErrorName(error) + " (" +
                cudaGetErrorString(error) + "); _C.cuda_probe() says whether the GPU works at all");
  }
}

template <class Policy>
const auto& reductions() {
  using Make = DeviceKernel<Policy>;
  static const ReduceTable<typename Make::Kernel, Make> table;
  return table;
}

// Asking for what it takes loads it. Where that fails, a launch will say so.
template <class Kernel>
void load(Kernel kernel) {
  cudaFuncAttributes attributes{};
  Driver::ignore(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}

template <class Policy>
void launch_reduction(const DeviceReduction& job, const ShareSync& sync, unsigned blocks,
                      void* stream) {
  const auto kernel = reductions<Policy>().find(job.kernel.dtype, job.kernel.op);
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(job.shares, sync);
  check_launch("a reduction");
}

// Of kernels_barrier.cu: one that waits for its counterparts, also where there is nothing to
// reduce.
void launch_barrier(const DeviceReduction& job, const ShareSync& sync, void* stream);
void load_barriers();

}  // namespace dpcore
