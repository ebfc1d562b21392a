// What buckets have in common over groups that are not dpcore's: ordinary memory of torch, and on a
// GPU one launch that copies all gradients of a bucket, as over a communicator of dpcore's own.
//
// Memory: torch's. Threads: see reducer/bucket/bucket_communicator.h; the GIL is not needed.
#pragma once

#include <memory>
#include <string>

#include "bindings/buckets/device_copier.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class GroupBuckets : public BucketCommunicator {
 public:
  // `launches`: null where no kernel of ours can run.
  GroupBuckets(at::Device device, std::shared_ptr<Device> launches)
      : device_(device), launches_(std::move(launches)), copier_(device.str()) {}

  at::Tensor allocate(size_t elements, at::ScalarType type, at::Device device) override;
  // Of a module on several devices, only on the first one.
  bool copies_together(at::ScalarType gradients, at::ScalarType flat,
                       at::Device device) const override;
  size_t copy_together(const GradientCopies& copies) override {
    return copier_.copy(*launches_, copies);
  }

 protected:
  static void check_algorithm(const BucketCall& call);

 private:
  at::Device device_;
  std::shared_ptr<Device> launches_;
  DeviceCopier copier_;
};

// Throws Unsupported where a call names an algorithm. `why`: there is none to choose.
void refuse_algorithm(const BucketCall& call, const std::string& why);

// Null on the CPU, and in a core without the part for GPUs.
std::shared_ptr<Device> launches_on(at::Device device);

}  // namespace dpcore
