// Neighbouring buckets that travel as one operation.
//
// Where a schedule may ask for that, buckets of one type are cut from one piece of memory, in the
// order of their numbers, so that neighbours are one range of bytes and nothing is copied. A bucket
// whose memory has moved since (numpy holds its last gradients) or that travels in a narrower type
// lies elsewhere: then the first bucket of the range keeps a buffer, allocated at its first use,
// and the bytes are copied there and back. Which of the two it is may differ between ranks; what
// travels is the same.
//
// Memory: `Bucket::joined` of the first bucket keeps what travels until the buckets are made anew.
// Threads: that of backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

#include "reducer/bucket/bucket.h"

namespace dpcore {

// Flat memory for one bucket after the other. `sizes` in elements; `like` has a tensor of each
// bucket's type and device. With `side_by_side`, those of one type that follow each other are parts
// of one allocation.
std::vector<at::Tensor> allocate_flats(const std::vector<size_t>& sizes,
                                       const std::vector<at::Tensor>& like, bool side_by_side,
                                       BucketCommunicator& communicator);

// The memory that travels for all of them. They hold one type, on one device.
const at::Tensor& join(std::span<Bucket> buckets, BucketCommunicator& communicator);
// After they have travelled: their results are where each of them expects its own.
void take_apart(std::span<Bucket> buckets);
// Of what travels.
uint64_t joined_layout(std::span<const Bucket> buckets);

}  // namespace dpcore
