// What may run instead of a bucket's all-reduce: a hook in Python, for example.
//
// The reducer starts a hook when the schedule launches the bucket, and waits for it where it would
// wait for the all-reduce; the result has to be in the bucket then. Threads: see
// bucket_communicator.h. Memory of its own is the hook's; it lives as long as the reducer, and
// buckets_changed() tells it that buckets have been planned anew. When a rank dies: wait() throws,
// like an all-reduce.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class BucketHook {
 public:
  virtual ~BucketHook() = default;
  virtual void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) = 0;
  virtual void wait(size_t slot, const at::Tensor& bucket) = 0;
  // Nobody will wait for it any more.
  virtual void abandon(size_t slot) = 0;
  virtual void buckets_changed(size_t buckets) = 0;
};

}  // namespace dpcore
