// Flat memory that buckets share: adjacent in one allocation, or the same memory in turn.
//
// Neighbours may be sent as one operation. If a schedule may do that, buckets of one type are cut
// from one allocation, in the order of their numbers, so that neighbours are one range of bytes and
// nothing is copied. A bucket whose memory has moved (numpy holds its last gradients) or that is
// sent in a narrower type lies elsewhere: then the first bucket of the range keeps a buffer,
// allocated at its first use, and the bytes are copied there and back. Ranks may differ in this;
// the bytes they send are the same.
//
// If each rank keeps only its part of the averages, buckets lend each other their memory. A bucket
// needs whole gradients from its launch until its reduce_scatter is complete; then only this rank's
// part remains, in `Bucket::kept`. So the bucket launched as number n + k can use the memory of the
// one launched as number n: with at most k buckets in flight, whole gradients take the memory of k
// buckets, regardless of the model's size. Before a launch the reducer waits for the bucket that
// used the memory before: Reducer::make_room().
//
// Memory: `Bucket::joined` of the first bucket keeps the buffer until the buckets are rebuilt; lent
// memory is k flat tensors for each type, owned by the buckets that share them. Threads: that of
// backward.
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

// The same, lent. `order` is that of launching, and `at_a_time` at least one.
std::vector<at::Tensor> lend_flats(const std::vector<size_t>& sizes,
                                   const std::vector<at::Tensor>& like,
                                   const std::vector<size_t>& order, size_t at_a_time,
                                   BucketCommunicator& communicator);

// The memory that travels for all of them. They hold one type, on one device.
const at::Tensor& join(std::span<Bucket> buckets, BucketCommunicator& communicator);
// After they have travelled: their results are where each of them expects its own.
void take_apart(std::span<Bucket> buckets);
// Of what travels.
uint64_t joined_layout(std::span<const Bucket> buckets);

// Elements of flat memory of which each rank has an equal part that begins as gradients do.
size_t padded_for_parts(size_t elements, size_t element_size, int world);
// A rank's part of a bucket's averages.
at::Tensor part_of_rank(const Bucket& bucket, int rank, int world);
// After its reduce_scatter: the flat memory may go to the next bucket.
void keep_part(Bucket& bucket, int rank);

}  // namespace dpcore
