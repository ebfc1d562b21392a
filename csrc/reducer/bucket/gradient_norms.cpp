// Sums of squares on the device of the gradients; nothing here waits for other ranks but finish().
#include "reducer/bucket/gradient_norms.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace dpcore {
namespace {

// `dot` uses several numbers at once on every processor; it would add 16-bit types in their own
// precision.
at::Tensor squared_norm(const at::Tensor& flat) {
  if (flat.is_complex()) {
    return squared_norm(at::view_as_real(flat).view({-1}));
  }
  if (flat.scalar_type() == at::kFloat || flat.scalar_type() == at::kDouble) {
    return at::dot(flat, flat);
  }
  return at::linalg_vector_norm(flat, 2, std::nullopt, false, at::kFloat).square();
}

}  // namespace

GradientNorms::GradientNorms(BucketCommunicator& communicator, at::Device device)
    : own_(communicator.allocate(2, at::kDouble, device)),
      mean_(at::zeros({1}, at::TensorOptions(at::kDouble).device(device))) {}

void GradientNorms::begin(uint64_t step, double variance) {
  const at::NoGradGuard no_grad;
  step_ = step;
  own_.narrow(0, 0, 1).zero_();
  own_.narrow(0, 1, 1).fill_(variance);
  mean_.zero_();
}

void GradientNorms::add(const at::Tensor& sum, const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  sum.add_(squared_norm(flat).to(sum.device(), at::kDouble));
}

void GradientNorms::add_own(const at::Tensor& flat) { add(own_.narrow(0, 0, 1), flat); }

void GradientNorms::add_mean(const at::Tensor& flat) { add(mean_, flat); }

void GradientNorms::start(BucketCommunicator& communicator, size_t slot, uint64_t layout) {
  if (is_in_flight_) {
    return;
  }
  communicator.start(slot, own_, {.op = ReduceOp::mean, .layout = layout, .background = false});
  is_in_flight_ = true;
}

void GradientNorms::finish(BucketCommunicator& communicator, size_t slot) {
  const at::NoGradGuard no_grad;
  if (!std::exchange(is_in_flight_, false)) {
    return;  // no bucket at all
  }
  communicator.wait(slot);
  steps_.push_back({step_, at::cat({own_, mean_})});
}

void GradientNorms::abandon(BucketCommunicator& communicator, size_t slot) {
  if (std::exchange(is_in_flight_, false)) {
    communicator.abandon(slot, own_);
  }
}

std::vector<GradientNorms::Step> GradientNorms::take() { return std::exchange(steps_, {}); }

}  // namespace dpcore
