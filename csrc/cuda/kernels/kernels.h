// Kernels on a stream of the GPU. No CUDA header, so that files compiled without nvcc can call
// them; `stream` is a cudaStream_t. Each returns when the kernel is in the stream's queue and
// throws Error when it could not be put there.
#pragma once

#include "cuda/kernels/part_copy.h"
#include "cuda/kernels/reduce_job.h"

namespace dpcore {

void launch(const DeviceReduction& job, void* stream);
// Among the kernels of other ranks, by either policy of share_sync.h.
void launch(const DeviceReduction& job, const ShareSync& sync, void* stream);
void launch(const PartList& list, void* stream);

// Brings the code of all of them to the current device. CUDA does so at the first launch otherwise
// and may wait for the whole device, on which another rank of this process may wait for this one.
void load_kernels();

}  // namespace dpcore
