// Gradients that arrive never, or more than once per backward: unused parameters, found in the
// graph or agreed on with the other ranks; parameters of a static graph; and those of a rank that
// has no inputs any more.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "reducer/reducer.h"

namespace dpcore {
namespace {

constexpr int kUrgent = 1 << 30;  // the map is small, and all that follows depends on it

}  // namespace

// ---- unused ones -----------------------------------------------------------------------------

// Gradients that this backward will not bring are there from its beginning.
void Reducer::find_unused() {
  if (reached_.empty()) {
    return;
  }
  if (settings_.skip_unused) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const std::vector<size_t>& members = buckets_[b].gradients;
      if (std::none_of(members.begin(), members.end(),
                       [&](size_t i) { return reached_[i] != 0 || accumulated_[i] != 0; })) {
        leave_out(b);
      }
    }
  }
  for (size_t i = 0; i < reached_.size(); ++i) {
    if (reached_[i] == 0) {
      // Whether others have them was agreed on when the graph was recorded.
      if (static_graph_ && used_[i] > 0 && !gradients_[i].parameter.grad().defined()) {
        undefined_.push_back(i);
      }
      arrive_without_gradient(i);
    }
  }
}

// A gradient that no rank had stays what it was. One that another rank had becomes the average
// here as well, so that optimizers go the same way everywhere.
void Reducer::agree_on_unused() {
  if (hook_) {
    wait_for_all();  // a hook may start operations of its own
  }
  std::fill(used_.begin(), used_.end(), 1);
  std::copy(reached_.begin(), reached_.end(), used_.begin());
  for (const size_t i : undefined_) {
    used_[i] = 0;
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    used_[i] |= accumulated_[i];
    accumulated_[i] = 0;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor here =
      at::from_blob(used_.data(), {static_cast<int64_t>(used_.size())}, at::kInt);
  used_anywhere_.copy_(here);
  const size_t slot = buckets_.size();
  try {
    communicator_->start(
        slot, used_anywhere_,
        {.op = ReduceOp::sum, .priority = kUrgent, .layout = settings_.tag, .background = false});
    const StepWatch::Wait waiting(watch_);
    communicator_->wait(slot);
  } catch (...) {
    raise_about("the map of used parameters");
  }
  here.copy_(used_anywhere_);
  undefined_.clear();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (used_[i] != 0 && !gradients_[i].is_sparse && !gradients_[i].parameter.grad().defined()) {
      undefined_.push_back(i);
    }
  }
}

// ---- static graphs ---------------------------------------------------------------------------

bool Reducer::is_last_of_static_graph(size_t i) {
  switch (static_graph_->arrives(i)) {
    case StaticGraph::Arrival::complete:
      return true;
    case StaticGraph::Arrival::more_to_come:
      return false;
    case StaticGraph::Arrival::recorded:
      if (!outermost_is_known_) {
        outermost_backward_begins();
      }
      return false;
    case StaticGraph::Arrival::unexpected:
      break;
  }
  throw Error("rank " + std::to_string(communicator_->rank()) + ", " + step_in_words() +
              ": a gradient of " + gradients_[i].name + " came " +
              (static_graph_->is_used(i) ? "more often than" : "though there was none") +
              " in the first backward, which static_graph=True takes for all. Leave it out, and "
              "pass find_unused_parameters=True when parameters are not always used");
}

void Reducer::arrive_as_recorded() {
  first_gradient_ns_ = now_ns();
  for (const size_t i : static_graph_->finish_recording()) {
    take(i);
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!static_graph_->is_used(i)) {
      if (!gradients_[i].parameter.grad().defined()) {
        undefined_.push_back(i);
      }
      arrive_without_gradient(i);
    }
  }
}

// ---- of a rank without inputs ----------------------------------------------------------------

void Reducer::shadow_backward() {
  wait_for_gradients();
  open(false);
  for (Gradient& gradient : gradients_) {
    if (!gradient.is_sparse) {
      leave_part_to_holders(gradient);  // this rank's gradients stay what they are
    }
  }
  for (Bucket& bucket : buckets_) {
    bucket.travelling().zero_();
    bucket.filled = true;
    bucket.missing = 0;
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    gradients_[i].iteration = iteration_;
    if (gradients_[i].is_sparse) {
      gradients_[i].parameter.mutable_grad().reset();
      sparse_.push_back(i);
    }
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    launch(b, {.priority = 0, .background = false});
  }
  wait_for_all();
  if (settings_.find_unused) {
    reached_.assign(gradients_.size(), 0);
    agree_on_unused();
  }
  undefined_.clear();
  if (!sparse_.empty()) {
    callbacks_.reduce_sparse(sparse_);
  }
  open_ = false;
  synchronised_ = false;
  watch_.shadow_ends();
  ++completed_;
}

}  // namespace dpcore
