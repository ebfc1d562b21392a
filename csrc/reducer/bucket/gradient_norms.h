// Squared norms of the gradients of one backward: of those that each rank sends, averaged over the
// ranks, and of their mean. From both follows how noisy a gradient is (dpcore/ddp/noise_scale.py).
//
// Each bucket is read once when it is sent and once when its mean is there. The ranks' own norms
// are averaged by an operation of two numbers, which is launched behind the last bucket. Sums stay
// on the device of the gradients, so nothing waits for a device here. Threads: those of the
// reducer. When a rank dies: finish() throws like the wait for a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class GradientNorms {
 public:
  // Of a step, as three numbers of type double: the mean over ranks of the squared norm of a rank's
  // gradient, the mean over ranks of what begin() was given, the squared norm of the mean.
  struct Step {
    uint64_t number;
    at::Tensor norms;
  };

  // What failed, in messages.
  static constexpr const char* kInWords =
      "gradient_noise_scale, which all ranks use in the same steps, for gradients";

  GradientNorms(BucketCommunicator& communicator, at::Device device);

  // `variance`: of this rank's gradient, as a multiple of that of one sample's.
  void begin(uint64_t step, double variance);
  void add_own(const at::Tensor& flat);
  void add_mean(const at::Tensor& flat);
  // Behind the last bucket.
  void start(BucketCommunicator& communicator, size_t slot, uint64_t layout);
  // When all buckets are complete.
  void finish(BucketCommunicator& communicator, size_t slot);
  void abandon(BucketCommunicator& communicator, size_t slot);

  // The steps that are complete, once.
  std::vector<Step> take();

 private:
  void add(const at::Tensor& sum, const at::Tensor& flat);

  at::Tensor own_;   // what travels
  at::Tensor mean_;  // of one step
  uint64_t step_ = 0;
  bool is_in_flight_ = false;
  std::vector<Step> steps_;
};

}  // namespace dpcore
