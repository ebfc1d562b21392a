// The path of a gradient, from autograd's hook to the end of backward. The code for every gradient
// comes first, then the code for every backward, then that for gradients that arrive never or more
// than once: unused parameters, static graphs, and ranks that have run out of inputs.
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "reducer/reducer.h"
#include "tensors/tensor_memory.h"

namespace dpcore {
namespace {

[[noreturn]] void raise_too_late(int rank, const Gradient& gradient) {
  throw Error("rank " + std::to_string(rank) + ": gradient of " + gradient.name +
              " arrived when its bucket was on its way already. Use every "
              "parameter in one backward per forward, put the earlier backward under no_sync(), "
              "or pass schedule='sequential'");
}

}  // namespace

void Reducer::gradient_ready(size_t i, const at::Tensor& incoming) {
  if (is_cut_ || computed_.was_dropped(i)) {
    return;  // the latter has arrived: reducer_compiled.cpp
  }
  if (!is_expected()) {
    accumulate(i);
    return;
  }
  const BirthPlan::Pause pause(births_.get());
  const auto afterwards = c10::make_scope_exit([this] { copier_.set_incoming(nullptr); });
  copier_.set_incoming(&incoming);
  try {
    if (!iteration_.open) {
      if (!progress_.are_all_over()) {
        raise_too_late(rank(), gradients_[i]);
      }
      open(true);
    }
    if (static_graph_ && !is_last_of_static_graph(i)) {
      return;
    }
    begin_backward_if_new();
    Gradient& gradient = gradients_[i];
    if (gradient.iteration == iteration_.number) {
      // Again in the same iteration. Autograd has added it to what is in the bucket.
      if (!gradient.is_sparse && buckets_[gradient.bucket].state != Bucket::filling) {
        raise_too_late(rank(), gradients_[i]);
      }
      if (!gradient.is_sparse) {
        copier_.bring_again(i);
      }
      if (!reached_.empty()) {
        reached_[i] = 1;  // by a forward before the last one
      }
      return;
    }
    take(i);
  } catch (...) {
    tell_autograd();
  }
}

// Gradients of a forward that is to be averaged, rather than of one within no_sync() or of the
// module by itself. A second backward after a forward is known by the outputs that it goes through.
bool Reducer::is_expected() const {
  const bool is_certain = iteration_.open ? !only_of_outputs_ : !progress_.are_all_over();
  return synchronised_ && (is_certain || output_hooks_.passes());
}

// This rank's own, until an average takes it along.
void Reducer::accumulate(size_t i) {
  used_.set_accumulated(i, gradients_[i].parameter.grad().defined());
  words_.add_local_gradient(i);
  if (sums_.is_watched) {
    record_.computes_until_ns = now_ns();
  }
}

void Reducer::take(size_t i) {
  Gradient& gradient = gradients_[i];
  if (gradient.is_sparse) {
    sparse_.push_back(i);
  } else {
    if (!gradient.parameter.grad().defined()) {
      undefined_.push_back(i);
    }
    if (births_) {
      births_->arrived(i, gradient);
    }
    const std::byte* place = gradient.address;
    copier_.bring(gradient);
    if (births_ && gradient.address != place) {
      births_->left(i);
    }
  }
  arrive(i);
}

// For a gradient that is still to come in this backward, and that nothing but us sees there.
BirthPlan::Place Reducer::place_of(size_t i) {
  const Gradient& gradient = gradients_[i];
  if (!iteration_.open || iteration_.again || gradient.iteration == iteration_.number || hook_ ||
      !hooks_ || !hooks_->is_alone(i) || !is_expected() || !copier_.may_be_born(gradient)) {
    return {};
  }
  return {&buckets_[gradient.bucket].flat.storage(), gradient.address};
}

void Reducer::arrive(size_t i) {
  Gradient& gradient = gradients_[i];
  gradient.iteration = iteration_.number;
  words_.take_along(i);
  record_.arrival.push_back(i);
  if (!rebuilt_) {
    record_.arrival_ns.push_back(now_ns());
  }
  ++iteration_.arrived;
  if (trace_.is_recorded()) {
    trace_.add_moment("gradient ready", EventKind::ready, i, gradient.bytes, now_ns());
  }
  const bool completes = !gradient.is_sparse && --buckets_[gradient.bucket].missing == 0;
  if (listens(LaunchSchedule::bucket_complete | LaunchSchedule::slice_complete)) {
    tell_of_complete_buckets();
  }
  if (listens(LaunchSchedule::gradient_ready)) {
    schedule_->on_gradient_ready(*this, i);
  }
  if (completes) {
    Bucket& bucket = buckets_[gradient.bucket];
    copier_.complete(bucket);
    record_.buckets[gradient.bucket].ready_ns = now_ns();
    if (listens(LaunchSchedule::bucket_ready)) {
      schedule_->on_bucket_ready(*this, gradient.bucket);
    }
  }
}

// A parameter that this backward does not reach contributes what it has accumulated, or zeros.
void Reducer::arrive_without_gradient(size_t i) {
  Gradient& gradient = gradients_[i];
  if (gradient.is_sparse) {
    sparse_.push_back(i);
  } else {
    copier_.bring(gradient);
  }
  arrive(i);
}

void Reducer::begin_backward_if_new() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == graph_task_) {
    return;
  }
  graph_task_ = task;
  if (!outermost_is_known_) {
    queue_end_of_backward();
  }
  if (iteration_.arrived > 0) {
    return;
  }
  record_.first_gradient_ns = now_ns();
  if (record_.computes_since_ns == 0) {
    record_.compute_begins(record_.first_gradient_ns);  // a backward again
  }
  find_unused();
}

void Reducer::outermost_backward_begins() {
  if (iteration_.open && !outermost_is_known_) {
    outermost_is_known_ = true;
    queue_end_of_backward();
  }
}

void Reducer::queue_end_of_backward() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (const auto alive = self.lock()) {
      alive->end_of_backward();
    }
  });
}

// ---- the end of backward ---------------------------------------------------------------------

void Reducer::end_of_backward() {
  if (!iteration_.open || is_cut_) {
    return;
  }
  const BirthPlan::Pause pause(births_.get());
  try {
    if (looks_at_compiled_) {
      look_at_compiled();
      looks_at_compiled_ = !rebuilt_;
    }
    const bool records = static_graph_ && static_graph_->is_recording();
    if (records) {
      arrive_as_recorded();
    }
    if (iteration_.arrived < gradients_.size()) {
      if (!iteration_.again) {
        has_ended_ = true;
        return;  // another backward may bring the rest; if none does, the next forward complains
      }
      for (size_t i = 0; i < gradients_.size(); ++i) {
        if (gradients_[i].iteration != iteration_.number) {
          if (!gradients_[i].parameter.grad().defined()) {
            undefined_.push_back(i);
          }
          arrive_without_gradient(i);
        }
      }
    }
    record_.backward_end_ns = record_.computes_until_ns = now_ns();
    sums_.add_compute(record_);
    ++sums_.backwards;
    trace_.end_compute(backward_, "backward", iteration_.number);
    launch_the_rest();
    if (settings_.find_unused || iteration_.again || records) {
      agree_on_unused();
    }
    if (!sparse_.empty()) {
      // Another order on another rank would pair different parameters.
      std::sort(sparse_.begin(), sparse_.end());
      const StepRecord::Wait waiting(record_);
      callbacks_.reduce_sparse(sparse_);
    }
    await_or_defer();
    iteration_.open = false;
    end_step_if_over();
  } catch (...) {
    tell_autograd();
  }
}

// In a catch block.
void Reducer::tell_autograd() {
  if (may_cut_) {
    try {
      throw;
    } catch (const PeerLost&) {
      is_cut_ = true;
    } catch (const Timeout&) {
      is_cut_ = true;
    } catch (...) {  // raised below
    }
  }
  if (!is_cut_) {
    callbacks_.raise();
  }
}

// The schedule launches what it has not launched so far.
void Reducer::launch_the_rest() {
  if (listens(LaunchSchedule::backward_end)) {
    backward_ends_ = true;
    const auto is_told = c10::make_scope_exit([this] { backward_ends_ = false; });
    schedule_->on_backward_end(*this);
  }
  if (next_launch_ < slices_.size()) {
    throw Error("schedule '" + schedule_->name() + "' has not launched " +
                in_words(slices_[next_launch_]) +
                " by the end of backward; launch or skip every bucket");
  }
}

void Reducer::refuse_tracing() {
  try {
    throw Unsupported(
        "compiled autograd traces backward before it runs, and DataParallel's hooks in C++ act "
        "while it runs. Switch it off: torch._dynamo.config.compiled_autograd = False; "
        "torch.compile of the forward needs no switch");
  } catch (...) {
    tell_autograd();
  }
}

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
                       [&](size_t i) { return reached_[i] != 0 || used_.has_accumulated(i); })) {
        leave_out(b);
      }
    }
  }
  for (size_t i = 0; i < reached_.size(); ++i) {
    if (reached_[i] == 0) {
      // Whether others have them was agreed on when the graph was recorded.
      if (static_graph_ && used_.counts()[i] > 0 && !gradients_[i].is_sparse &&
          !gradients_[i].parameter.grad().defined()) {
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
  try {
    const StepRecord::Wait waiting(record_);
    used_.agree(reached_, undefined_, buckets_.size(), settings_.tag);
  } catch (...) {
    raise_about("the map of used parameters");
  }
  undefined_.clear();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (used_.counts()[i] != 0 && !gradients_[i].is_sparse &&
        !gradients_[i].parameter.grad().defined()) {
      undefined_.push_back(i);
    }
  }
}

// ---- static graphs ---------------------------------------------------------------------------

void Reducer::set_static_graph() {
  if (iteration_.completed > 0) {
    throw Error("a static graph is recorded in the first iteration, and this model has run " +
                std::to_string(iteration_.completed) +
                ": the setting should be called before training loop starts");
  }
  settings_.find_unused = false;  // the record says it
  static_graph_ = std::make_unique<StaticGraph>(gradients_.size());
}

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
  throw Error("rank " + std::to_string(rank()) + ", " + step_in_words() + ": a gradient of " +
              gradients_[i].name + " came " +
              (static_graph_->is_used(i) ? "more often than" : "though there was none") +
              " in the first backward, which static_graph=True takes for all. Leave it out, and "
              "pass find_unused_parameters=True when parameters are not always used");
}

void Reducer::arrive_as_recorded() {
  const std::vector<StaticGraph::Recorded> recorded = static_graph_->finish_recording();
  record_.first_gradient_ns = recorded.empty() ? now_ns() : recorded.front().ns;
  for (const StaticGraph::Recorded& last : recorded) {
    take(last.gradient);
    if (!rebuilt_) {
      record_.arrival_ns.back() = last.ns;
    }
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
  words_.end_forward_without_inputs();
  open(false);
  for (Gradient& gradient : gradients_) {
    if (!gradient.is_sparse) {
      copier_.leave_part_to_holders(gradient);  // this rank's gradients stay what they are
    }
  }
  for (Bucket& bucket : buckets_) {
    bucket.travelling().zero_();
    bucket.filled = true;
    bucket.missing = 0;
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    gradients_[i].iteration = iteration_.number;
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
  iteration_.open = false;
  synchronised_ = false;
  ++sums_.backwards;
  ++iteration_.completed;
  hear_words(iteration_.completed);
}

}  // namespace dpcore
