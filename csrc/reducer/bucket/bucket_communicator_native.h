// The reducer's communicator over the native core.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

// Buckets are blocks of this rank's arena. `ordered`: only algorithms whose result does not depend
// on how gradients are put together, whatever the communicator's own algorithm is. A call may name
// another one, unless the model is `deterministic`.
std::shared_ptr<BucketCommunicator> native_bucket_communicator(
    std::shared_ptr<Communicator> communicator, bool ordered, bool deterministic,
    Engine::Interrupt interrupt);

// What every communicator of ours is asked for, in place: the bucket's mean or sum, or half of
// that.
Request request_of(const at::Tensor& bucket, const BucketCall& call, int rank, int world);

}  // namespace dpcore
