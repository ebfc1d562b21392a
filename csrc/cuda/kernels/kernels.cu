// The kernels that never wait: one worker per thread of the functions in share_sync.h and parts.h.
#include "cuda/kernels/kernels.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/kernels/kernels_launch.cuh"

namespace dpcore {
namespace {

// Enough of them to keep all loads in flight; more only queue up.
constexpr size_t kBlocksPerProcessor = 8;

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ PartList list) {
  element::copy_block(list, blockIdx.x, threadIdx.x, kThreads);
}

size_t processors() {
  // Of the device that is current, asked anew: a process may use several.
  int device = 0;
  int count = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // the launch will say it
  }
  return static_cast<size_t>(std::max(count, 1));
}

void launch_in_order(const DeviceReduction& job, const ShareSync& sync, void* stream) {
  const ReduceShares& shares = job.shares;
  if (shares.count == 0) {
    return;
  }
  const size_t per_block = shares.packs > 0 ? kThreads * 4 : kThreads;
  const size_t work = shares.packs > 0 ? shares.packs : shares.count;
  const size_t blocks =
      std::clamp((work + per_block - 1) / per_block, size_t{1}, processors() * kBlocksPerProcessor);
  launch_reduction<element::StreamOrder>(job, sync, static_cast<unsigned>(blocks), stream);
}

}  // namespace

void launch(const DeviceReduction& job, void* stream) { launch_in_order(job, {}, stream); }

void launch(const DeviceReduction& job, const ShareSync& sync, void* stream) {
  if (sync.has_barrier()) {
    launch_barrier(job, sync, stream);
  } else {
    launch_in_order(job, sync, stream);
  }
}

void launch(const PartList& list, void* stream) {
  if (blocks_of(list) == 0) {
    return;
  }
  copy_kernel<<<blocks_of(list), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(list);
  check_launch("a copy of gradients");
}

void load_kernels() {
  reductions<element::StreamOrder>().each([](auto kernel) { load(kernel); });
  load_barriers();
  load(copy_kernel);
}

}  // namespace dpcore
