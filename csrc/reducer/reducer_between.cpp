// Between a backward and the next forward: gradients that are still in flight when the program goes
// on, and gradients that another reducer of the same parameters brings.
#include <algorithm>

#include "comm/base/error.h"
#include "reducer/reducer.h"

namespace dpcore {
// ---- in flight -------------------------------------------------------------------------------

// From here on the program may read `parameter.grad`: to clip it, to log it, to step. What is
// still in flight is waited for now, unless the schedule waits when the optimizer steps and whoever
// reads a gradient before that can be made to wait as well.
void Reducer::await_or_withhold() {
  if (iteration_.unfinished == 0) {
    return;
  }
  const bool on_journey = launcher_.legs().journey().updates();
  const bool defers = on_journey || launcher_.listens(LaunchSchedule::optimizer_step);
  if (!defers && launcher_.listens(LaunchSchedule::forward_begin)) {
    const auto first = std::find_if(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) {
      return bucket.state != Bucket::complete;
    });
    throw Error("schedule '" + launcher_.schedule().name() + "' leaves " +
                describe(first - buckets_.begin(), *first, gradients_) +
                " in flight at the end of backward and waits for it in forward_begin, after the "
                "optimizer has used its gradients. Wait in backward_end, or define "
                "optimizer_step and wait there");
  }
  if (on_journey && settings_.grad_is_part) {
    make_undefined();
  }
  // A gradient that is replaced, made or handled by a hook at the end can't be withheld.
  const bool is_memory_of_buckets =
      settings_.grad_is_part && undefined_.empty() && sparse_.empty() && !launcher_.hook();
  if (defers && is_memory_of_buckets && withhold_ && withhold_(true)) {
    withheld_ = true;
  } else {
    launcher_.wait_for_all();
  }
}

// Gradients that were withheld are the program's from here on.
void Reducer::give_back() {
  if (withheld_) {
    withheld_ = false;
    withhold_(false);
  }
}

void Reducer::optimizer_steps() {
  launcher_.optimizer_steps();
  wait_for_gradients();
}

void Reducer::wait_for_gradients() {
  if (!iteration_.is_on_journey()) {
    return;
  }
  if (iteration_.stepped) {
    launcher_.finish_journeys();
    return;
  }
  launcher_.wait_for_all();
  if (launcher_.legs().journey().updates() && !launcher_.legs().journey().updates_parts()) {
    give_back();
  }
}

bool Reducer::is_averaged(size_t i) const {
  const Gradient& gradient = gradients_.at(i);
  return !iteration_.open || !is_expected() || gradient.is_sparse ||
         buckets_[gradient.bucket].state == Bucket::complete;
}

// ---- another reducer of the same parameters --------------------------------------------------

// From here on `parameter.grad` is not memory of a bucket: that of one reducer would be on its way
// while the other one reads it.
void Reducer::share_parameters_with(const std::shared_ptr<Reducer>& other) {
  wait_for_gradients_if_possible();
  shared_with_.push_back(other);
  copier_.set_may_move(false);
  for (Gradient& gradient : gradients_) {
    if (gradient.part.defined() && gradient.is_in_place()) {
      copier_.leave_part_to_holders(gradient);
    }
  }
}

bool Reducer::shares_parameters() const {
  return std::any_of(shared_with_.begin(), shared_with_.end(),
                     [](const std::weak_ptr<Reducer>& other) { return !other.expired(); });
}

// Where the group has failed, nothing is in flight any more.
void Reducer::wait_for_gradients_if_possible() {
  try {
    wait_for_gradients();
  } catch (const Error&) {
  }
}

// Another reducer of these parameters goes forward. Gradients that come now are its own, unless
// this one expects some from a forward of its own that has had no backward yet.
void Reducer::stand_back() {
  wait_for_gradients_if_possible();
  const bool expects = iteration_.open && iteration_.arrived == 0 && is_usable();
  if (!expects) {
    synchronised_ = false;
  }
}

bool Reducer::is_usable() const {
  try {
    communicator_->check_usable();
  } catch (const Error&) {
    return false;
  }
  return failure_.first == nullptr;
}

}  // namespace dpcore
