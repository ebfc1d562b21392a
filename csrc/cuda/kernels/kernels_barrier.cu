// The kernels with a barrier between ranks in them, see InKernelBarrier in share_sync.h. They are
// in a file of their own so that nvcc compiles them beside those of kernels.cu.
#include "cuda/kernels/kernels_launch.cuh"

namespace dpcore {

void launch_barrier(const DeviceReduction& job, const ShareSync& sync, void* stream) {
  launch_reduction<element::InKernelBarrier>(job, sync, static_cast<unsigned>(sync.blocks), stream);
}

void load_barriers() {
  reductions<element::InKernelBarrier>().each([](auto kernel) { load(kernel); });
}

}  // namespace dpcore
