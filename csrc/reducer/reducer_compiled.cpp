// Gradients that a compiled backward announces while it runs, so that their buckets leave before it
// has ended.
//
// A compiled backward is one node of autograd, which returns all gradients at its end. An operation
// in its graph (dpcore/ddp/compiled) announces each gradient where it has been computed. If it is
// the whole gradient, it is added to `parameter.grad` then, as AccumulateGrad would do, and counts
// as arrived. What the node delivers later is compared with it and dropped. Every other gradient
// arrives when the node delivers it, as without the operation.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "comm/base/error.h"
#include "reducer/reducer.h"

namespace dpcore {

bool Reducer::gradient_computed(size_t i, const at::Tensor& value) {
  if (const char* why = why_declined(i, value)) {
    decline(i, why);
    return false;
  }
  try {
    begin_backward_if_new();
    if (gradients_[i].iteration == iteration_.number) {
      return false;  // forward's outputs do not reach it, so it has arrived as unused
    }
    const bool is_new = !gradients_[i].parameter.grad().defined();
    copier_.bring_computed(gradients_[i], value);
    computed_.take(i, value);
    take(i);
    if (births_ && is_new) {
      births_->was_announced(i);
    }
  } catch (...) {
    tell_autograd();
  }
  return true;
}

void Reducer::decline(size_t i, const char* why) {
  if (iteration_.open && gradients_[i].iteration != iteration_.number) {
    computed_.decline(i, why);
  }
}

// A hook on buckets may step an optimizer, and the graph still reads parameters. A second reducer
// of the same parameters, a static graph and buckets that are lent expect gradients when autograd
// adds them. Other types and shapes are converted on the way to AccumulateGrad.
const char* Reducer::why_declined(size_t i, const at::Tensor& value) const {
  const Gradient& gradient = gradients_[i];
  const at::Tensor& parameter = gradient.parameter;
  const at::Tensor& grad = parameter.grad();
  const auto is_plain = [&](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.requires_grad() &&
           tensor.scalar_type() == parameter.scalar_type() &&
           tensor.device() == parameter.device() && tensor.sizes() == parameter.sizes();
  };
  if (is_cut_ || !iteration_.open || iteration_.again || !is_expected() ||
      gradient.iteration == iteration_.number) {
    return "they are not averaged in this backward";
  }
  if (hook_) {
    return "a communication hook may step parameters that the graph still reads";
  }
  if (static_graph_) {
    return "static_graph=True counts them when autograd adds them";
  }
  if (!shared_with_.empty()) {
    return "another wrapper averages the same parameters";
  }
  if (at::GradMode::is_enabled()) {
    return "create_graph=True keeps a graph of them";
  }
  if (gradient.is_sparse || !is_plain(value) || (grad.defined() && !is_plain(grad))) {
    return "their type, layout or shape is not that of the parameter";
  }
  return buckets_[gradient.bucket].kept.defined() ? "their bucket has been lent" : nullptr;
}

bool Reducer::is_taken(size_t i, const at::Tensor& delivered) {
  switch (computed_.deliver(i, delivered)) {
    case ComputedGradients::Delivery::other:
      return false;
    case ComputedGradients::Delivery::same:
      return true;
    case ComputedGradients::Delivery::differs:
      break;
  }
  try {
    throw Error("rank " + std::to_string(rank()) + ", " + step_in_words() + ": the gradient of " +
                gradients_[i].name +
                " that a compiled backward announced is not the one that it delivered, and the "
                "first may have been averaged already. Something changes gradients between the "
                "compiled graph and the parameter; pass torch.compile(..., options="
                "{'joint_custom_post_pass': None}), so that they are averaged when they are "
                "delivered");
  } catch (...) {
    tell_autograd();
  }
  return true;
}

void Reducer::look_at_compiled() {
  if (hooks_) {
    from_compiled_ = hooks_->count_compiled();
  }
}

}  // namespace dpcore
