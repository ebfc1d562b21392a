// Memory for whole gradients that buckets use one after the other.
//
// A bucket needs all of its flat memory from its launch until its reduce_scatter is over; what
// stays is this rank's part, in `Bucket::kept`. So the bucket that is launched as number n + k can
// have the memory of the one that was launched as number n: with k buckets in flight at most, whole
// gradients take the memory of k buckets, however large the model is.
//
// Memory: k flat tensors for each type, owned by the buckets that share them. Who writes to one
// waits for the bucket before: Reducer::make_room(). Threads: that of backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "reducer/bucket/bucket.h"

namespace dpcore {

// For one bucket after the other. `sizes` in elements; `like` has a tensor of each bucket's type
// and device; `order` is that of launching, and `at_a_time` at least one.
std::vector<at::Tensor> lend_flats(const std::vector<size_t>& sizes,
                                   const std::vector<at::Tensor>& like,
                                   const std::vector<size_t>& order, size_t at_a_time,
                                   BucketCommunicator& communicator);

// After its reduce_scatter: the flat memory may go to the next bucket.
void keep_part(Bucket& bucket, int rank);

}  // namespace dpcore
