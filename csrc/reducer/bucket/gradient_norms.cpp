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

void GradientNorms::measure_next(double variance) {
  if (!own_.defined()) {
    own_ = communicator_->allocate(3, at::kDouble, device_);
    mean_ = at::zeros({1}, at::TensorOptions(at::kDouble).device(device_));
  }
  variance_ = variance;
}

void GradientNorms::begin(uint64_t step, size_t slot, bool adds_to_averages, bool in_parts) {
  const std::optional<double> variance = std::exchange(variance_, std::nullopt);
  if (std::exchange(is_on_, variance && !adds_to_averages)) {
    before_.reset();  // the last measured step has no end
  }
  if (!is_on_) {
    return;
  }
  abandon();  // no end of the last backward
  const at::NoGradGuard no_grad;
  step_ = step;
  slot_ = slot;
  own_.narrow(0, 0, 1).zero_();
  own_.narrow(0, 1, 1).fill_(*variance);
  own_.narrow(0, 2, 1).copy_(mean_);
  mean_.zero_();
  in_parts_ = in_parts;
}

void GradientNorms::add(const at::Tensor& sum, const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  sum.add_(squared_norm(flat).to(sum.device(), at::kDouble));
}

void GradientNorms::add_own(const at::Tensor& flat) { add(own_.narrow(0, 0, 1), flat); }

void GradientNorms::add_mean(const at::Tensor& flat) { add(mean_, flat); }

void GradientNorms::start() {
  if (is_in_flight_) {
    return;
  }
  communicator_->start(slot_, own_, {.op = ReduceOp::mean, .layout = layout_, .background = false});
  is_in_flight_ = true;
}

void GradientNorms::finish() {
  const at::NoGradGuard no_grad;
  is_on_ = false;
  if (!std::exchange(is_in_flight_, false)) {
    return;  // no bucket at all
  }
  communicator_->wait(slot_);
  const at::Tensor own = own_.narrow(0, 0, 2);
  if (!in_parts_) {
    steps_.push_back({step_, at::cat({own, mean_})});
    return;
  }
  if (before_) {
    before_->norms = at::cat({before_->norms, own_.narrow(0, 2, 1).mul(communicator_->world())});
    steps_.push_back(*before_);
  }
  before_ = Step{step_, own.clone()};
}

void GradientNorms::abandon() {
  if (std::exchange(is_in_flight_, false)) {
    communicator_->abandon(slot_, own_);
  }
}

std::vector<GradientNorms::Step> GradientNorms::take() { return std::exchange(steps_, {}); }

}  // namespace dpcore
