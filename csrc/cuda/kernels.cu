// The kernels: one worker per thread of the functions in reduce_share.h and parts.h.
#include "cuda/kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "comm/error.h"
#include "cuda/reduce_table.h"

namespace dpcore {
namespace {

constexpr int kThreads = 256;
// Enough of them to keep all loads in flight; more only queue up.
constexpr size_t kBlocksPerProcessor = 8;

template <class Reducer>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ ReduceShares job) {
  const size_t worker = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  Reducer::run(job, worker, static_cast<size_t>(gridDim.x) * kThreads);
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ PartList list) {
  element::copy_block(list, blockIdx.x, threadIdx.x, kThreads);
}

struct OnDevice {
  using Kernel = void (*)(const ReduceShares);
  template <class Reducer>
  static Kernel make() {
    return &reduce_kernel<Reducer>;
  }
};

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw Error(std::string(what) + " was not launched: " + cudaGetErrorName(error) + " (" +
                cudaGetErrorString(error) + "); _C.cuda_probe() says whether the GPU works at all");
  }
}

size_t processors() {
  // Of the device that is current, asked anew: a process may use several.
  int device = 0;
  int count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return static_cast<size_t>(std::max(count, 1));
}

}  // namespace

void launch(const DeviceReduction& job, void* stream) {
  static const ReduceTable<OnDevice::Kernel, OnDevice> table;
  const ReduceShares& shares = job.shares;
  if (shares.count == 0) return;
  const size_t per_block = shares.packs > 0 ? kThreads * 4 : kThreads;
  const size_t work = shares.packs > 0 ? shares.packs : shares.count;
  const size_t blocks =
      std::clamp((work + per_block - 1) / per_block, size_t{1}, processors() * kBlocksPerProcessor);
  table.find(
      job.kernel.dtype,
      job.kernel
          .op)<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      shares);
  check_launch("a reduction");
}

void launch(const PartList& list, void* stream) {
  if (blocks_of(list) == 0) return;
  copy_kernel<<<blocks_of(list), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(list);
  check_launch("a copy of gradients");
}

}  // namespace dpcore
