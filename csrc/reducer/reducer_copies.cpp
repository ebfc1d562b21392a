// How gradients come into what travels, and results back out of it.
//
// Where the communicator copies together (on a device), nothing is copied as gradients come: when
// the last one of a bucket is there, one launch brings all of them, cast on the way when the bucket
// travels in a narrower type. Fresh tensors of autograd are let go right after the launch: memory
// that is freed into the stream that reads it is not written before. Gradients that lie otherwise
// than their parameter (sparse ones, other strides) are copied alone, as everywhere else.
//
// In a narrower type, `parameter.grad` is replaced when the bucket is sent and not before: until
// then autograd may add to it, and its part of the bucket has no numbers of this backward.
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "reducer/reducer.h"

namespace dpcore {

void Reducer::choose_copies(Bucket& bucket) {
  const at::ScalarType own = bucket.flat.scalar_type();
  const bool narrows = narrow_type_ && bucket.flat.is_floating_point() &&
                       c10::elementSize(own) > c10::elementSize(*narrow_type_);
  if (!narrows) {
    bucket.narrow.reset();
  } else if (!bucket.narrow.defined() || bucket.narrow.scalar_type() != *narrow_type_) {
    bucket.narrow = communicator_->allocate(static_cast<size_t>(bucket.flat.numel()), *narrow_type_,
                                            bucket.flat.device());
  }
  bucket.together = communicator_->copies_together(own, bucket.travelling().scalar_type());
  copied_.reserve(std::max(copied_.capacity(), bucket.gradients.size()));
  copied_of_.reserve(std::max(copied_of_.capacity(), bucket.gradients.size()));
}

void Reducer::reduce_as(at::ScalarType type) {
  use_hook(nullptr);
  narrow_type_ = type;
  for (Bucket& bucket : buckets_) {
    choose_copies(bucket);
  }
}

// Gradients of one bucket may be computed in several streams, as their forwards were.
void Reducer::come_to_this_stream(Bucket& bucket) {
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

// Of a gradient that has come; together with the others of its bucket where that is better.
void Reducer::bring(Gradient& gradient) {
  Bucket& bucket = buckets_[gradient.bucket];
  come_to_this_stream(bucket);
  if (bucket.together || bucket.kept.defined() || gradient.is_in_place()) {
    return;  // later
  }
  leave_part_to_holders(gradient);
  gradient.collect();
  settle(gradient);
  ++copies_.alone;
}

// Autograd has added to a gradient that had come before.
void Reducer::bring_again(size_t i) {
  Bucket& bucket = buckets_[gradients_[i].bucket];
  if (!bucket.together) {
    bring(gradients_[i]);
    return;
  }
  come_to_this_stream(bucket);
  if (bucket.missing == 0 && !bucket.narrow.defined()) {
    gather(bucket, {&i, 1});
  }
}

void Reducer::gather(Bucket& bucket, std::span<const size_t> members) {
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
        ++copies_.alone;
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
    at::Tensor& grad = gradients_[i].parameter.mutable_grad();
    if (!grad.defined()) {
      continue;  // its part is zeros
    }
    if (!bucket.has_one_stream) {
      c10::impl::VirtualGuardImpl(grad.device().type())
          .recordDataPtrOnStream(grad.storage().data_ptr(), *bucket.stream);
    }
    if (!gradients_[i].is_in_place()) {
      settle(gradients_[i]);
    }
  }
}

void Reducer::fill_narrow(Bucket& bucket) {
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

// ---- out -------------------------------------------------------------------------------------

// The results of a bucket that is complete, to where `parameter.grad` is.
void Reducer::hand_out(Bucket& bucket) {
  if (arrived_ == 0) {
    return;  // a rank without inputs has lent zeros, and its gradients are not of this iteration
  }
  const at::NoGradGuard no_grad;
  if (bucket.narrow.defined() && bucket.together) {
    hand_out_narrow(bucket);
    return;
  }
  if (bucket.narrow.defined()) {
    bucket.flat.copy_(bucket.narrow);
  }
  if (scale_ != 1 && !hook_) {
    bucket.flat.mul_(scale_);
  }
  if (!settings_.grad_is_part || bucket.has_own) {
    hand_out_to_own(bucket);
  }
}

// From the bucket to gradients that are memory of their own.
void Reducer::hand_out_to_own(Bucket& bucket) {
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
      ++copies_.alone;
    }
  }
  copy_together(bucket, bucket.flat, false, 1);
}

// By one launch, which casts and scales.
void Reducer::hand_out_narrow(Bucket& bucket) {
  copied_.clear();
  if (settings_.grad_is_part) {
    copied_.push_back(
        {bucket.flat.mutable_data_ptr(), 0, static_cast<uint64_t>(bucket.flat.numel())});
    copy_together(bucket, bucket.narrow, false, scale_);
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
  copy_together(bucket, bucket.narrow, false, scale_);
  for (const size_t i : bucket.gradients) {
    Gradient& gradient = gradients_[i];
    at::Tensor& grad = gradient.parameter.mutable_grad();
    if (grad.defined() && !gradient.has_layout_of_part()) {
      grad.copy_(gradient.part);
      ++copies_.alone;
    }
  }
}

// Between `flat` and what copied_ lists.
void Reducer::copy_together(const Bucket& bucket, const at::Tensor& flat, bool to_flat,
                            double factor) {
  if (copied_.empty()) {
    return;
  }
  copies_.launches +=
      communicator_->copy_together({copied_, bucket.flat.scalar_type(), flat, to_flat, factor});
  const bool is_whole = copied_.size() == 1 && copied_[0].address == bucket.flat.const_data_ptr();
  copies_.together += is_whole ? bucket.gradients.size() : copied_.size();
}

}  // namespace dpcore
