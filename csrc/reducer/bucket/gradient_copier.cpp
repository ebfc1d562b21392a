// See gradient_copier.h.
#include "reducer/bucket/gradient_copier.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "tensors/place_leases.h"
#include "tensors/tensor_memory.h"

namespace dpcore {

void GradientCopier::prepare(Bucket& bucket) {
  const at::ScalarType own = bucket.flat.scalar_type();
  const bool narrows = narrow_type_ && bucket.flat.is_floating_point() &&
                       c10::elementSize(own) > c10::elementSize(*narrow_type_);
  if (!narrows) {
    bucket.narrow.reset();
  } else if (!bucket.narrow.defined() || bucket.narrow.scalar_type() != *narrow_type_) {
    bucket.narrow = communicator_->allocate(static_cast<size_t>(bucket.flat.numel()), *narrow_type_,
                                            bucket.flat.device());
  }
  bucket.together =
      communicator_->copies_together(own, bucket.travelling().scalar_type(), bucket.flat.device());
  copied_.reserve(std::max(copied_.capacity(), bucket.gradients.size()));
  copied_of_.reserve(std::max(copied_of_.capacity(), bucket.gradients.size()));
}

void GradientCopier::travel_as(std::optional<at::ScalarType> narrow) {
  narrow_type_ = narrow;
  for (Bucket& bucket : buckets_) {
    prepare(bucket);
  }
}

// Gradients of one bucket may be computed in several streams, as their forwards were.
void GradientCopier::come_to_this_stream(Bucket& bucket) {
  const at::Device device = bucket.flat.device();
  if (device.is_cpu()) {
    return;
  }
  const c10::Stream here = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (bucket.stream && *bucket.stream != here) {
    c10::Event so_far(device.type());
    so_far.record(*bucket.stream);
    so_far.block(here);
    bucket.has_one_stream = false;
  }
  bucket.stream = here;
}

// ---- in --------------------------------------------------------------------------------------

void GradientCopier::bring(Gradient& gradient) {
  Bucket& bucket = buckets_[gradient.bucket];
  come_to_this_stream(bucket);
  if (bucket.together || bucket.kept.defined() || adopt(gradient) || gradient.is_in_place()) {
    return;  // later
  }
  leave_part_to_holders(gradient);
  gradient.collect();
  settle(gradient);
  ++counts_.alone;
}

// As AccumulateGrad, but a first gradient goes to its part at once.
void GradientCopier::bring_computed(Gradient& gradient, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  at::Tensor& grad = gradient.parameter.mutable_grad();
  if (grad.defined()) {
    grad.add_(value);
    return;
  }
  if (!grad_is_part_ || !may_move_) {
    grad = at::empty_strided(gradient.part.sizes(), gradient.part.strides(), value.options());
    grad.copy_(value);
    return;
  }
  leave_part_to_holders(gradient);
  grad = tensor_like(gradient.part);
  if (value.const_data_ptr() != gradient.address) {
    grad.copy_(value);
    ++counts_.alone;
  }
}

void GradientCopier::bring_again(size_t i) {
  Bucket& bucket = buckets_[gradients_[i].bucket];
  if (!bucket.together) {
    bring(gradients_[i]);
    return;
  }
  come_to_this_stream(bucket);
  if (bucket.missing == 0 && !bucket.narrow.defined() && !bucket.kept.defined()) {
    gather(bucket, {&i, 1});
  }
}

void GradientCopier::gather(Bucket& bucket, std::span<const size_t> members) {
  const at::NoGradGuard no_grad;
  const at::Tensor& target = bucket.travelling();
  const size_t element = target.element_size();
  copied_.clear();
  copied_of_.clear();
  for (const size_t i : members) {
    if (!gradients_[i].is_in_place()) {
      leave_part_to_holders(gradients_[i]);
    }
  }
  for (const size_t i : members) {
    Gradient& gradient = gradients_[i];
    const at::Tensor* source = &gradient.parameter.grad();
    if (!gradient.is_in_place()) {
      if (gradient.has_layout_of_part()) {
        warn_of_graph(*source);
      } else {
        gradient.collect();
        settle(gradient);
        ++counts_.alone;
        source = &gradient.part;
      }
    }
    // What is in the bucket's own memory has arrived, unless it travels in another type.
    if (bucket.narrow.defined() || source->const_data_ptr() != gradient.part.const_data_ptr()) {
      copied_.push_back({const_cast<void*>(source->const_data_ptr()),
                         gradient.first_element * element, static_cast<uint64_t>(source->numel())});
      copied_of_.push_back(i);
    }
  }
  copy_together(bucket, target, true, 1);
  for (const size_t i : copied_of_) {
    const at::Tensor& grad = gradients_[i].parameter.grad();
    if (!grad.defined()) {
      continue;  // its part is zeros
    }
    keep_until_read(bucket, grad);
    if (!gradients_[i].is_in_place()) {
      settle(gradients_[i]);
    }
  }
}

// Its memory is freed into the stream that it was made in, which may be another one.
void GradientCopier::keep_until_read(const Bucket& bucket, const at::Tensor& grad) {
  if (!bucket.has_one_stream && grad.layout() == at::kStrided) {
    c10::impl::VirtualGuardImpl(grad.device().type())
        .recordDataPtrOnStream(grad.storage().data_ptr(), *bucket.stream);
  }
}

void GradientCopier::fill_narrow(Bucket& bucket) {
  if (!bucket.narrow.defined() || bucket.filled) {
    return;
  }
  bucket.filled = true;
  if (bucket.together) {
    gather(bucket, bucket.gradients);
  } else {
    const at::NoGradGuard no_grad;
    bucket.narrow.copy_(bucket.flat);
  }
}

// Gradients stay where autograd has put them until their bucket is sent, because it has no memory
// before (bucket/flat_memory.h). From then on `parameter.grad` is where the gradient was copied to,
// which is the next bucket's memory soon: nothing may read it, and the optimizer gets
// `Bucket::kept`.
void GradientCopier::fill_lent(Bucket& bucket) {
  if (!bucket.kept.defined()) {
    return;
  }
  const at::NoGradGuard no_grad;
  copied_.clear();
  for (const size_t i : bucket.gradients) {
    Gradient& gradient = gradients_[i];
    if (bucket.together && gradient.has_layout_of_part()) {
      const at::Tensor& grad = gradient.parameter.grad();
      warn_of_graph(grad);
      copied_.push_back({const_cast<void*>(grad.const_data_ptr()),
                         gradient.first_element * grad.element_size(),
                         static_cast<uint64_t>(grad.numel())});
    } else {
      gradient.collect();
      ++counts_.alone;
    }
  }
  copy_together(bucket, bucket.flat, true, 1);
  for (const size_t i : bucket.gradients) {
    if (at::Tensor& grad = gradients_[i].parameter.mutable_grad(); grad.defined()) {
      keep_until_read(bucket, grad);
      grad = tensor_like(gradients_[i].part);
    }
  }
}

void GradientCopier::fill(Bucket& bucket) {
  come_to_this_stream(bucket);
  fill_narrow(bucket);
  fill_lent(bucket);
}

// ---- out -------------------------------------------------------------------------------------

void GradientCopier::hand_out(Bucket& bucket, bool are_averages) {
  const at::NoGradGuard no_grad;
  const double factor = are_averages ? scale_ : 1;
  if (bucket.narrow.defined() && bucket.together) {
    hand_out_narrow(bucket, factor);
    return;
  }
  if (bucket.narrow.defined()) {
    bucket.flat.copy_(bucket.narrow);
  }
  if (factor != 1) {
    bucket.flat.mul_(factor);
  }
  if (!grad_is_part_ || bucket.has_own) {
    hand_out_to_own(bucket);
  }
}

// From the bucket to gradients that are memory of their own.
void GradientCopier::hand_out_to_own(Bucket& bucket) {
  copied_.clear();
  for (const size_t i : bucket.gradients) {
    Gradient& gradient = gradients_[i];
    at::Tensor& grad = gradient.parameter.mutable_grad();
    if (!grad.defined() || gradient.is_in_place()) {
      continue;
    }
    if (bucket.together && gradient.has_layout_of_part()) {
      copied_.push_back({grad.mutable_data_ptr(), gradient.first_element * grad.element_size(),
                         static_cast<uint64_t>(grad.numel())});
    } else {
      grad.copy_(gradient.part);
      ++counts_.alone;
    }
  }
  copy_together(bucket, bucket.flat, false, 1);
}

// By one launch, which casts and scales.
void GradientCopier::hand_out_narrow(Bucket& bucket, double factor) {
  copied_.clear();
  if (grad_is_part_) {
    copied_.push_back(
        {bucket.flat.mutable_data_ptr(), 0, static_cast<uint64_t>(bucket.flat.numel())});
    copy_together(bucket, bucket.narrow, false, factor);
    if (bucket.has_own) {
      hand_out_to_own(bucket);
    }
    return;
  }
  const size_t element = bucket.narrow.element_size();
  for (const size_t i : bucket.gradients) {
    const Gradient& gradient = gradients_[i];
    // Without one of its own, it may be given the part's result by agree_on_unused().
    const at::Tensor& to =
        gradient.has_layout_of_part() ? gradient.parameter.grad() : gradient.part;
    copied_.push_back({to.mutable_data_ptr(), gradient.first_element * element,
                       static_cast<uint64_t>(to.numel())});
  }
  copy_together(bucket, bucket.narrow, false, factor);
  for (const size_t i : bucket.gradients) {
    Gradient& gradient = gradients_[i];
    at::Tensor& grad = gradient.parameter.mutable_grad();
    if (grad.defined() && !gradient.has_layout_of_part()) {
      grad.copy_(gradient.part);
      ++counts_.alone;
    }
  }
}

// Between `flat` and what copied_ lists.
void GradientCopier::copy_together(const Bucket& bucket, const at::Tensor& flat, bool to_flat,
                                   double factor) {
  if (copied_.empty()) {
    return;
  }
  counts_.launches +=
      communicator_->copy_together({copied_, bucket.flat.scalar_type(), flat, to_flat, factor});
  const bool is_whole = copied_.size() == 1 && copied_[0].address == bucket.flat.const_data_ptr();
  counts_.together += is_whole ? bucket.gradients.size() : copied_.size();
}

// ---- whose memory -----------------------------------------------------------------------------

void GradientCopier::leave_part_to_holders(Gradient& gradient) {
  const bool has_moved = gradient.part.storage().data() != gradient.address;  // share_memory_()
  const bool is_held = owners_of(gradient.part.storage()) > 1;
  const bool is_leased = lease_on(gradient.address) != Lease::none;
  if (!has_moved && !is_held && !is_leased) {
    return;
  }
  Bucket& bucket = buckets_[gradient.bucket];
  if (is_leased ||
      (!has_moved && may_be_numpys(gradient.part) && communicator_->allocates_alone())) {
    leave_bucket_to_holders(bucket);
    return;
  }
  if (!has_moved) {
    const at::NoGradGuard no_grad;
    move_storage_to_copy(gradient.part);
  }
  gradient.make_part(bucket.flat);
}

void GradientCopier::leave_bucket_to_holders(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  ++counts_.moved;
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

bool GradientCopier::may_be_born(const Gradient& gradient) const {
  const Bucket& bucket = buckets_[gradient.bucket];
  const c10::Storage& storage = gradient.part.storage();
  return grad_is_part_ && may_move_ && communicator_->lends_places() &&
         bucket.state == Bucket::filling && !bucket.skipped && !bucket.together &&
         !bucket.narrow.defined() && !bucket.kept.defined() && !gradient.is_sparse &&
         !gradient.parameter.grad().defined() && storage.data() == gradient.address &&
         owners_of(storage) == 1 && !may_be_numpys(gradient.part) &&
         lease_on(gradient.address) == Lease::none;
}

// False: `parameter.grad` has not been made in its place, or has other owners, to whom the bucket's
// memory is left: then it is a gradient elsewhere.
bool GradientCopier::adopt(Gradient& gradient) {
  if (lease_on(gradient.address) != Lease::open || !gradient.has_layout_of_part()) {
    return false;
  }
  const at::Tensor& grad = gradient.parameter.grad();
  if (grad.const_data_ptr() != gradient.address ||
      grad.storage().is_alias_of(gradient.part.storage())) {
    return false;
  }
  if (!may_move_ || !gradient.is_autograds_alone(incoming_)) {
    leave_bucket_to_holders(buckets_[gradient.bucket]);
    return false;
  }
  settle(gradient);
  settle_lease(gradient.address);  // autograd drops its tensor after the hook
  ++counts_.born;
  return true;
}

void GradientCopier::leave_to_leases(Bucket& bucket) {
  const bool is_leased =
      std::any_of(bucket.gradients.begin(), bucket.gradients.end(),
                  [&](size_t i) { return lease_on(gradients_[i].address) == Lease::open; });
  if (is_leased) {
    leave_bucket_to_holders(bucket);
  }
}

void GradientCopier::settle(Gradient& gradient) {
  if (grad_is_part_ && gradient.parameter.grad().defined() &&
      !gradient.settle(incoming_, may_move_)) {
    buckets_[gradient.bucket].has_own = true;
  }
}

}  // namespace dpcore
