// See group_buckets.h.
#include "bindings/buckets/group_buckets.h"

#include <ATen/ops/zeros.h>

#include "comm/base/error.h"
#include "comm/schedule/program.h"

namespace dpcore {

at::Tensor GroupBuckets::allocate(size_t elements, at::ScalarType type, at::Device device) {
  return at::zeros({static_cast<int64_t>(elements)},
                   at::TensorOptions().dtype(type).device(device));
}

bool GroupBuckets::copies_together(at::ScalarType gradients, at::ScalarType flat,
                                   at::Device device) const {
  try {
    return launches_ != nullptr && device == device_ && DeviceCopier::can_copy(gradients, flat);
  } catch (const Unsupported&) {  // a type that dpcore does not have, and the group may
    return false;
  }
}

void refuse_algorithm(const BucketCall& call, const std::string& why) {
  if (call.algorithm != nullptr) {
    throw Unsupported("algorithm '" + call.algorithm->name + "': " + why);
  }
}

void GroupBuckets::check_algorithm(const BucketCall& call) {
  refuse_algorithm(call,
                   "MPI, CuPy and groups of torch such as gloo choose for themselves; leave "
                   "algorithm out, or run over dpcore's own communicator, comm=dpcore.init()");
}

std::shared_ptr<Device> launches_on(at::Device device) {
  try {
    return device.is_cuda() ? device_named(device.str()) : nullptr;
  } catch (const Unsupported&) {
    return nullptr;
  }
}

}  // namespace dpcore
