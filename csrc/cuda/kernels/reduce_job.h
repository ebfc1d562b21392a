// A reduction on its way to a device: checked, lowered, and cut into heads and packs.
//
// No CUDA here: the launcher of kernels takes the job from here, and so does the host, where tests
// run the same functions.
#pragma once

#include <span>

#include "comm/reduce/reduce.h"
#include "comm/reduce/reduce_lowering.h"
#include "cuda/kernels/share_sync.h"

namespace dpcore {

struct DeviceReduction {
  ReduceShares shares;
  LoweredReduction kernel;  // which entry of the table runs it
};

// Throws Unsupported for what has no meaning and for more than kMaxOperands inputs or outputs.
DeviceReduction reduce_job(const ReduceSpec& spec, std::span<const void* const> in,
                           std::span<void* const> out, size_t count);

// All shares of the job, one worker after the other, on memory of the host.
void run_on_host(const DeviceReduction& job, size_t workers);
// As a kernel among those of other ranks (share_sync.h), sync.blocks blocks of one worker each, one
// after the other: on each rank in the same order, so that their barriers match.
void run_on_host(const DeviceReduction& job, const ShareSync& sync);

}  // namespace dpcore
