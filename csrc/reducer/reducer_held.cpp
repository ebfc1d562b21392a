// Whose memory a gradient is: the bucket's, that of somebody who kept it, or the program's.
//
// Before a part of a bucket is filled anew, whoever still holds the last gradient, or a view of it,
// is left with its numbers: the storage that they share gets a copy, and the part a storage of its
// own. A numpy array has an address and no storage; for it, the bucket goes elsewhere. Plain steps
// hold nothing, and pay for looking at a reference count. A gradient in memory of the program's
// stays there, and results are copied to it.
#include <ATen/core/grad_mode.h>

#include "reducer/reducer.h"
#include "tensors/tensor_memory.h"

namespace dpcore {

void Reducer::leave_part_to_holders(Gradient& gradient) {
  const bool has_moved = gradient.part.storage().data() != gradient.address;  // share_memory_()
  const bool is_held = owners_of(gradient.part.storage()) > 1;
  if (!has_moved && !is_held) {
    return;
  }
  Bucket& bucket = buckets_[gradient.bucket];
  if (!has_moved && may_be_numpys(gradient.part) && communicator_->allocates_alone()) {
    leave_bucket_to_holders(bucket);
    return;
  }
  if (!has_moved) {
    const at::NoGradGuard no_grad;
    move_storage_to_copy(gradient.part);
  }
  gradient.make_part(bucket.flat);
}

void Reducer::leave_bucket_to_holders(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  const at::Tensor before = bucket.flat;
  bucket.flat = communicator_->allocate(before.numel(), before.scalar_type(), before.device());
  bucket.flat.copy_(before);
  for (const size_t i : bucket.gradients) {
    const bool was_in_place = gradients_[i].is_in_place();
    gradients_[i].make_part(bucket.flat);
    if (was_in_place) {
      settle(gradients_[i]);
    }
  }
}

// `parameter.grad` has been copied into its part.
void Reducer::settle(Gradient& gradient) {
  if (settings_.grad_is_part && gradient.parameter.grad().defined() &&
      !gradient.settle(incoming_, !shares_parameters())) {
    buckets_[gradient.bucket].has_own = true;
  }
}

}  // namespace dpcore
