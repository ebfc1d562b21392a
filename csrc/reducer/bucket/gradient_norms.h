// Squared norms of the gradients of one backward: those of each rank's gradients, averaged over the
// ranks, and that of their mean. Both give the noise of a gradient (dpcore/ddp/noise_scale).
//
// Each bucket is read once when it is sent and once when it is averaged. The ranks' own norms are
// averaged by an operation of three numbers, which is launched after the last bucket. Where a rank
// has only a part of each mean, the third is what its parts of the last measured step came to: that
// step is complete when the next one is. Sums stay on the device of the gradients, so no thread
// waits for a device here. Threads: those of the reducer.
// When a rank dies: finish() throws like the wait for a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
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

  // `layout`: of the model, to be compared between ranks.
  GradientNorms(std::shared_ptr<BucketCommunicator> communicator, at::Device device,
                uint64_t layout)
      : communicator_(std::move(communicator)), device_(device), layout_(layout) {}

  // Those of the next backward, on all ranks, unless it adds to averages: these no longer
  // belong to one rank. `variance`: of this rank's gradient, as a multiple of that of one sample's.
  void measure_next(double variance);
  // A backward begins. `slot`: of the communicator, for the numbers. `in_parts`: add_mean() gets
  // this rank's part of each bucket, and not the whole.
  void begin(uint64_t step, size_t slot, bool adds_to_averages, bool in_parts);
  bool is_on() const { return is_on_; }
  void add_own(const at::Tensor& flat);
  void add_mean(const at::Tensor& flat);
  // Behind the last bucket.
  void start();
  // When all buckets are complete.
  void finish();
  void abandon();

  // The steps that are complete, once.
  std::vector<Step> take();

 private:
  void add(const at::Tensor& sum, const at::Tensor& flat);

  std::shared_ptr<BucketCommunicator> communicator_;
  at::Device device_;
  uint64_t layout_;
  std::optional<double> variance_;  // where those of the next backward are wanted
  bool is_on_ = false;
  bool in_parts_ = false;
  std::optional<Step> before_;  // a step whose parts travel with the next one
  at::Tensor own_;              // what travels; made when norms are wanted first
  at::Tensor mean_;             // of one step
  uint64_t step_ = 0;
  size_t slot_ = 0;
  bool is_in_flight_ = false;
  std::vector<Step> steps_;
};

}  // namespace dpcore
