// The path of a gradient, from autograd's hook to the end of backward. What happens for every
// gradient comes first, what happens for every backward follows; the way of a bucket is in
// reducer_launch.cpp. Gradients that do not come, or not once, are in reducer_unused.cpp.
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "reducer/reducer.h"
#include "tensors/tensor_memory.h"

namespace dpcore {

void Reducer::gradient_ready(size_t i, const at::Tensor& incoming) {
  if (!synchronised_) {
    accumulated_[i] = gradients_[i].parameter.grad().defined() ? 1 : 0;
    if (watch_.is_watched()) {
      watch_.goes_on(now_ns());
    }
    return;
  }
  const auto afterwards = c10::make_scope_exit([this] { incoming_ = nullptr; });
  incoming_ = &incoming;
  try {
    if (!open_) {
      if (unfinished_ > 0) {
        raise_too_late(i);
      }
      open(true);
    }
    if (static_graph_ && !is_last_of_static_graph(i)) {
      return;
    }
    begin_backward_if_new();
    Gradient& gradient = gradients_[i];
    if (gradient.iteration == iteration_) {
      // Again in the same iteration. Autograd has added it to what is in the bucket.
      if (!gradient.is_sparse && buckets_[gradient.bucket].state != Bucket::filling) {
        raise_too_late(i);
      }
      if (!gradient.is_sparse) {
        bring_again(i);
      }
      return;
    }
    take(i);
  } catch (...) {
    callbacks_.raise();
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
    bring(gradient);
  }
  arrive(i);
}

void Reducer::arrive(size_t i) {
  Gradient& gradient = gradients_[i];
  gradient.iteration = iteration_;
  arrival_.push_back(i);
  if (!rebuilt_) {
    arrival_ns_.push_back(now_ns());
  }
  ++arrived_;
  if (is_recorded()) {
    note_moment("gradient ready", EventKind::ready, i, gradient.bytes, now_ns());
  }
  const bool completes = !gradient.is_sparse && --buckets_[gradient.bucket].missing == 0;
  if (listens(LaunchSchedule::bucket_complete)) {
    notice_complete();
  }
  if (listens(LaunchSchedule::gradient_ready)) {
    schedule_->on_gradient_ready(*this, i);
  }
  if (completes) {
    Bucket& bucket = buckets_[gradient.bucket];
    if (bucket.together && !bucket.narrow.defined()) {
      gather(bucket, bucket.gradients);
    }
    bucket.ready_ns = now_ns();
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
    bring(gradient);
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
  if (arrived_ > 0) {
    return;
  }
  first_gradient_ns_ = now_ns();
  if (!watch_.computes()) {
    watch_.forward_begins(first_gradient_ns_);  // a backward again
  }
  find_unused();
}

void Reducer::outermost_backward_begins() {
  if (open_ && !outermost_is_known_) {
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
  if (!open_) {
    return;
  }
  try {
    const bool records = static_graph_ && static_graph_->is_recording();
    if (records) {
      arrive_as_recorded();
    }
    if (arrived_ < gradients_.size()) {
      if (!again_) {
        has_ended_ = true;
        return;  // another backward may bring the rest; if none does, the next forward complains
      }
      for (size_t i = 0; i < gradients_.size(); ++i) {
        if (gradients_[i].iteration != iteration_) {
          if (!gradients_[i].parameter.grad().defined()) {
            undefined_.push_back(i);
          }
          arrive_without_gradient(i);
        }
      }
    }
    times_.end_of_backward_ns = now_ns();
    watch_.backward_ends(times_.end_of_backward_ns);
    end_compute(backward_, "backward");
    if (listens(LaunchSchedule::backward_end)) {
      schedule_->on_backward_end(*this);
    }
    if (next_launch_ < order_.size()) {
      throw Error("schedule '" + schedule_->name() + "' has not launched " +
                  describe(order_[next_launch_], buckets_[order_[next_launch_]], gradients_) +
                  " by the end of backward; launch or skip every bucket");
    }
    if (settings_.find_unused || again_ || records) {
      agree_on_unused();
    }
    if (!sparse_.empty()) {
      // Another order on another rank would pair different parameters.
      std::sort(sparse_.begin(), sparse_.end());
      const StepWatch::Wait waiting(watch_);
      callbacks_.reduce_sparse(sparse_);
    }
    await_or_withhold();
    open_ = false;
    if (unfinished_ == 0) {
      finish_iteration();
    }
  } catch (...) {
    callbacks_.raise();
  }
}

// Gradients that autograd had none of, and another rank had.
void Reducer::make_undefined() {
  for (const size_t i : undefined_) {
    Gradient& gradient = gradients_[i];
    gradient.parameter.mutable_grad() =
        settings_.grad_is_part ? tensor_like(gradient.part) : gradient.part.clone();
  }
  undefined_.clear();
}

void Reducer::finish_iteration() {
  make_undefined();
  give_back();
  if (std::exchange(measures_norms_, false)) {
    finish_norms();
  }
  backward_ns_ = now_ns() - first_gradient_ns_;
  times_.sample(completed_, first_gradient_ns_, buckets_);
  if (watch_.is_watched()) {
    note_ways();
  }
  ++completed_;
}

void Reducer::note_ways() {
  for (const Bucket& bucket : buckets_) {
    if (!bucket.skipped) {
      const uint64_t elements = bucket.bytes / bucket.flat.element_size();
      watch_.add_way(bucket.launched_ns, bucket.over_ns,
                     elements * bucket.travelling().element_size());
    }
    if (bucket.next_leg_launched_ns != 0) {
      watch_.add_way(bucket.next_leg_launched_ns, bucket.next_leg_over_ns, bucket.bytes);
    }
  }
  watch_.step_ends();
}

// ---- traces ----------------------------------------------------------------------------------

void Reducer::note_moment(const char* name, EventKind kind, uint64_t number, uint64_t bytes,
                          int64_t now) {
  TraceRecorder* trace = communicator_->trace();
  if (trace == nullptr || !trace->recording()) {
    return;
  }
  TraceEvent event = event_of(name, kind, number);
  event.bytes = bytes;
  event.begin_ns = event.end_ns = now;
  if (!communicator_->add_moment(event)) {
    trace->add(event);
  }
}

TraceEvent Reducer::event_of(const char* name, EventKind kind, uint64_t number) const {
  TraceEvent event;
  event.name = name;
  event.kind = kind;
  event.operation = number;
  event.schedule = settings_.traced_as;  // only operations have one of their own
  return event;
}

void Reducer::begin_compute(Compute& compute, const char* name) {
  compute.begin_ns = now_ns();
  compute.span = communicator_->begin_span(event_of(name, EventKind::compute, iteration_));
}

void Reducer::end_compute(Compute& compute, const char* name) {
  if (compute.begin_ns == 0) {
    return;
  }
  TraceRecorder* trace = communicator_->trace();
  if (compute.span != 0) {
    communicator_->end_span(compute.span);
  } else if (trace != nullptr) {
    TraceEvent event = event_of(name, EventKind::compute, iteration_);
    event.begin_ns = compute.begin_ns;
    event.end_ns = now_ns();
    trace->add(event);
  }
  compute = {};
}

}  // namespace dpcore
