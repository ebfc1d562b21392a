// See device_copier.h.
#include "bindings/buckets/device_copier.h"

#include "bindings/buffer.h"
#include "tensors/tensor_memory.h"

namespace dpcore {

bool DeviceCopier::can_copy(at::ScalarType gradients, at::ScalarType flat) {
  return can_copy_parts(dtype_of(gradients, "gradient"), dtype_of(flat, "bucket"));
}

size_t DeviceCopier::copy(Device& device, const GradientCopies& copies) {
  parts_.clear();
  for (const FlatGradient& gradient : copies.gradients) {
    parts_.push_back({gradient.address, gradient.flat_bytes, gradient.elements});
  }
  fill_part_lists(lists_, parts_, dtype_of(copies.type, "gradient"), copies.flat.mutable_data_ptr(),
                  dtype_of(copies.flat.scalar_type(), "bucket"), copies.to_flat, copies.factor);
  const DeviceGuard here(device);
  const Device::Stream current = current_stream_of(device_name_);
  for (const PartList& list : lists_) {
    device.copy_parts(current, list);
  }
  return lists_.size();
}

}  // namespace dpcore
