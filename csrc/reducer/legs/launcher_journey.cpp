// Legs after the first: who launches them, who waits for them where, and when the optimizer's part
// of a bucket is done. See launcher.h.
#include "reducer/legs/launcher.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"

namespace dpcore {

void Launcher::set_modules(std::vector<std::vector<size_t>> modules) {
  modules_ = std::move(modules);
  find_order_of_need();
}

void Launcher::find_order_of_need() {
  order_of_need_.clear();
  needed_by_none_.clear();
  std::vector<bool> is_listed(reducer_.buckets.size());
  std::vector<bool> is_awaited(reducer_.gradients.size());
  for (const std::vector<size_t>& module : modules_) {
    for (const size_t i : module) {
      const size_t b = bucket_of(i);
      is_awaited[i] = true;
      if (b != kNoBucket && !is_listed[b]) {
        is_listed[b] = true;
        order_of_need_.push_back(b);
      }
    }
  }
  for (size_t i = 0; i < reducer_.gradients.size(); ++i) {
    if (!is_awaited[i] && bucket_of(i) != kNoBucket) {
      needed_by_none_.push_back(bucket_of(i));
    }
  }
}

// A rank that has left out a step is told from the others by its layouts.
uint64_t Launcher::salted(uint64_t layout) const {
  return update_steps_ == 0 ? layout : Fnv().add(layout).add(update_steps_).value();
}

// The leg that the bucket was on, or its update, is over.
void Launcher::advance(size_t b) {
  legs_.advance(b);
  if (legs_.is_over(b)) {
    --reducer_.iteration.unfinished;
  }
}

// At the end of backward every first leg is launched, on all ranks in the same order, so the next
// one may be launched behind it.
bool Launcher::may_follow(size_t b) const {
  return backward_ends_ && legs_.journey().gathers_gradients() &&
         reducer_.buckets.at(b).state == Bucket::launched;
}

void Launcher::launch_next_leg(size_t b, Launch how) {
  const auto refuse = [&](const std::string& why) {
    throw Error("schedule '" + schedule_->name() + "': launch of " + in_words(b) + why);
  };
  if (legs_.is_over(b) || legs_.is_in_flight(b)) {
    return;
  }
  const bool follows = may_follow(b);
  if (!follows && legs_.next(b) != Leg::all_gather) {
    refuse(", whose next leg is update: call control.update()");
  }
  if (in_forward_) {
    refuse(
        " in forward_begin, where ranks may differ in the modules that they run; launch it in "
        "bucket_ready, backward_end or optimizer_step");
  }
  Bucket& bucket = reducer_.buckets[b];
  BucketCall call;
  call.priority = how.priority;
  call.background = how.background;
  if (follows) {
    call.after = b;
  }
  call.layout = salted(Fnv().add(bucket.layout).add(uint64_t{1}).value());
  bucket.next_leg_launched_ns = now_ns();
  reducer_.trace.note_moment("bucket launch", EventKind::launch, b, bucket.bytes,
                             bucket.next_leg_launched_ns);
  try {
    legs_.start_gather(b, bucket, call);
  } catch (...) {
    raise_about(in_words(b));
  }
}

// Of the parameters, when a gather of them has failed.
std::string Launcher::which_are_new() const {
  std::string old;
  for (size_t b = 0; b < reducer_.buckets.size(); ++b) {
    if (!legs_.is_over(b)) {
      old += (old.empty() ? "" : ", ") + std::to_string(b);
    }
  }
  return ". The parameters of this rank lie between step " +
         std::to_string(reducer_.iteration.completed) + " and step " +
         std::to_string(reducer_.iteration.step()) + ": buckets " + old +
         " are not whole, the others are new. Go on from a checkpoint";
}

void Launcher::wait_for_leg(size_t b) {
  if (!legs_.is_in_flight(b)) {
    return;
  }
  Bucket& bucket = reducer_.buckets[b];
  int64_t over_ns = 0;
  try {
    const StepWatch::Wait waiting(reducer_.watch);
    over_ns = legs_.wait_for_gather(b);
  } catch (...) {
    const bool of_parameters = legs_.journey().updates_parts();
    raise_about(in_words(b), of_parameters ? which_are_new() : "");
  }
  bucket.complete_ns = now_ns();
  bucket.next_leg_launched_ns = std::max(bucket.next_leg_launched_ns, bucket.over_ns);
  bucket.next_leg_over_ns = over_ns != 0 ? over_ns : bucket.complete_ns;
  if (!legs_.journey().updates_parts()) {
    hand_out(bucket);
    if (listens(LaunchSchedule::bucket_complete)) {
      schedule_->on_bucket_complete(*this, b);
    }
  }
  advance(b);
  end_iteration_if_over();
}

void Launcher::update(std::span<const size_t> buckets) {
  if (!legs_.journey().updates()) {
    throw Error("schedule '" + schedule_->name() +
                "': update(), though its journey() has no update; the program steps by itself");
  }
  updated_.clear();
  for (const size_t b : buckets) {
    const bool is_named_twice = std::find(updated_.begin(), updated_.end(), b) != updated_.end();
    if (is_named_twice || legs_.has_updated(b) || !reducer_.iteration.stepped) {
      continue;
    }
    if (legs_.next(b) != Leg::update) {
      throw Error("schedule '" + schedule_->name() + "': update of " + in_words(b) +
                  " before its " + name_of(*legs_.next(b)) + " is over; wait for the bucket first");
    }
    updated_.push_back(b);
  }
  if (updated_.empty()) {
    return;
  }
  StepTrace::Compute span;
  if (reducer_.trace.is_recorded()) {
    reducer_.trace.begin_compute(span, "update", reducer_.iteration.number);
  }
  reducer_.update(updated_);
  reducer_.trace.end_compute(span, "update", reducer_.iteration.number);
  for (const size_t b : updated_) {
    advance(b);
  }
  end_iteration_if_over();
}

void Launcher::optimizer_steps() {
  if (listens(LaunchSchedule::optimizer_step) && reducer_.iteration.is_on_journey()) {
    schedule_->on_optimizer_step(*this);
  }
}

void Launcher::forward_of_module_begins(size_t module) {
  if (listens(LaunchSchedule::forward_begin) && reducer_.iteration.is_on_journey()) {
    in_forward_ = true;
    const auto afterwards = c10::make_scope_exit([this] { in_forward_ = false; });
    schedule_->on_forward_begin(*this, module);
  }
}

bool Launcher::update_steps(bool are_withheld) {
  ++update_steps_;
  if (!reducer_.iteration.is_on_journey()) {
    return false;
  }
  reducer_.iteration.stepped = true;
  if (listens(LaunchSchedule::optimizer_step)) {
    schedule_->on_optimizer_step(*this);
  }
  if (legs_.journey().updates_parts()) {
    for (size_t b = 0; b < reducer_.buckets.size(); ++b) {
      if (!legs_.is_over(b) && !legs_.is_in_flight(b)) {
        throw Error("schedule '" + schedule_->name() + "' has not launched all_gather of " +
                    in_words(b) + " by the end of optimizer_step");
      }
    }
  } else if (!are_withheld) {
    finish_journeys();  // somebody has read the gradients, so all of them are there
  }
  return true;
}

void Launcher::finish_journeys() {
  if (!reducer_.iteration.is_on_journey()) {
    return;
  }
  for (const size_t b : order_) {
    finish_journey(b);
  }
}

void Launcher::finish_journey(size_t b) {
  wait(b);
  while (!legs_.is_over(b)) {
    if (legs_.is_in_flight(b)) {
      wait_for_leg(b);
    } else if (legs_.next(b) == Leg::update && reducer_.iteration.stepped) {
      update(b);
    } else if (reducer_.iteration.stepped || legs_.next(b) == Leg::all_gather) {
      throw Error("schedule '" + schedule_->name() + "' has not launched the next leg of " +
                  in_words(b) + ", " + name_of(*legs_.next(b)));
    } else {
      legs_.drop(b);
      --reducer_.iteration.unfinished;
      end_iteration_if_over();
    }
  }
}

void Launcher::forward_begins_on_journey() {
  if (!reducer_.iteration.is_on_journey()) {
    return;
  }
  if (!reducer_.iteration.stepped) {
    finish_journeys();
    return;
  }
  for (const size_t b : needed_by_none_) {
    finish_journey(b);
  }
}

}  // namespace dpcore
