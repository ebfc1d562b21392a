// Gradients of a bucket to its memory, or back, by one launch of a device: for communicators whose
// buckets are on one, whatever carries them.
//
// Memory: none but the lists of a call, which keep theirs. Threads: that of forward and backward.
#pragma once

#include <string>
#include <vector>

#include "cuda/device/device.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class DeviceCopier {
 public:
  explicit DeviceCopier(std::string device_name) : device_name_(std::move(device_name)) {}

  static bool can_copy(at::ScalarType gradients, at::ScalarType flat);
  // See BucketCommunicator::copy_together().
  size_t copy(Device& device, const GradientCopies& copies);

 private:
  std::string device_name_;
  std::vector<FlatPart> parts_;
  std::vector<PartList> lists_;
};

}  // namespace dpcore
