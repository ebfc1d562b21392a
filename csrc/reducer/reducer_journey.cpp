// The legs after the first, on journeys that end under the next forward: who launches them, who
// waits for them where, and when the optimizer's part of a bucket is done.
//
//   backward         first legs, in the background                         (reducer_launch.cpp)
//   update_steps()   the optimizer has noted its step; zero1 updates and gathers
//   forward          each module waits for what it needs, by the schedule's forward_begin
//   end of forward   whatever is left
//
// A program that leaves out the step ends the journey where the update would have been.
#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "reducer/reducer.h"

namespace dpcore {

void Reducer::set_modules(std::vector<std::vector<size_t>> modules) {
  modules_ = std::move(modules);
  find_order_of_need();
}

void Reducer::find_order_of_need() {
  order_of_need_.clear();
  needed_by_none_.clear();
  std::vector<bool> is_listed(buckets_.size());
  std::vector<bool> is_awaited(gradients_.size());
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
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!is_awaited[i] && bucket_of(i) != kNoBucket) {
      needed_by_none_.push_back(bucket_of(i));
    }
  }
}

// A rank that has left out a step is told from the others by its layouts.
uint64_t Reducer::salted(uint64_t layout) const {
  return update_steps_ == 0 ? layout : Fnv().add(layout).add(update_steps_).value();
}

// The leg that the bucket was on, or its update, is over.
void Reducer::advance(size_t b) {
  legs_.advance(b);
  if (legs_.is_over(b)) {
    --unfinished_;
  }
}

void Reducer::launch_next_leg(size_t b, Launch how) {
  const auto refuse = [&](const std::string& why) {
    throw Error("schedule '" + schedule_->name() + "': launch of " +
                describe(b, buckets_[b], gradients_) + why);
  };
  if (legs_.is_over(b) || legs_.is_in_flight(b)) {
    return;
  }
  if (legs_.next(b) != Leg::all_gather) {
    refuse(", whose next leg is update: call control.update()");
  }
  if (in_forward_) {
    refuse(
        " in forward_begin, where ranks may differ in the modules that they run; launch it in "
        "bucket_ready, backward_end or optimizer_step");
  }
  Bucket& bucket = buckets_[b];
  BucketCall call;
  call.priority = how.priority;
  call.background = how.background;
  call.layout = salted(Fnv().add(bucket.layout).add(uint64_t{1}).value());
  bucket.next_leg_launched_ns = now_ns();
  note_moment("bucket launch", EventKind::launch, b, bucket.bytes, bucket.next_leg_launched_ns);
  try {
    legs_.start_gather(b, bucket, call);
  } catch (...) {
    raise_with_bucket(b);
  }
}

void Reducer::wait_for_leg(size_t b) {
  if (!legs_.is_in_flight(b)) {
    return;
  }
  Bucket& bucket = buckets_[b];
  try {
    const StepWatch::Wait waiting(watch_);
    legs_.wait_for_gather(b);
  } catch (...) {
    const bool of_parameters = legs_.journey().updates_parts();
    raise_about(describe(b, bucket, gradients_), of_parameters ? which_are_new() : "");
  }
  bucket.complete_ns = now_ns();
  const int64_t over_ns = communicator_->over_ns(b);
  bucket.next_leg_over_ns = over_ns != 0 ? over_ns : bucket.complete_ns;
  if (!legs_.journey().updates_parts()) {
    hand_out(bucket);
    if (listens(LaunchSchedule::bucket_complete)) {
      schedule_->on_bucket_complete(*this, b);
    }
  }
  advance(b);
  if (unfinished_ == 0 && !open_) {
    finish_iteration();
  }
}

void Reducer::update(size_t b) {
  if (!legs_.journey().updates()) {
    throw Error("schedule '" + schedule_->name() +
                "': update(), though its journey() has no update; the program steps by itself");
  }
  if (legs_.has_updated(b) || !stepped_) {
    return;
  }
  if (legs_.next(b) != Leg::update) {
    throw Error("schedule '" + schedule_->name() + "': update of " +
                describe(b, buckets_.at(b), gradients_) + " before its " + name_of(*legs_.next(b)) +
                " is over; wait for the bucket first");
  }
  Compute span;
  if (is_recorded()) {
    begin_compute(span, "update");
  }
  callbacks_.update(b);
  end_compute(span, "update");
  advance(b);
  if (unfinished_ == 0 && !open_) {
    finish_iteration();
  }
}

bool Reducer::update_steps() {
  ++update_steps_;
  if (!is_on_journey()) {
    return false;
  }
  stepped_ = true;
  if (listens(LaunchSchedule::optimizer_step)) {
    schedule_->on_optimizer_step(*this);
  }
  if (legs_.journey().updates_parts()) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (!legs_.is_over(b) && !legs_.is_in_flight(b)) {
        throw Error("schedule '" + schedule_->name() + "' has not launched all_gather of " +
                    describe(b, buckets_[b], gradients_) + " by the end of optimizer_step");
      }
    }
  } else if (!withheld_) {
    finish_journeys();  // somebody has read the gradients, so all of them are there
  }
  return true;
}

void Reducer::finish_journeys() {
  if (!is_on_journey()) {
    return;
  }
  for (const size_t b : order_) {
    finish_journey(b);
  }
}

void Reducer::finish_journey(size_t b) {
  wait(b);
  while (!legs_.is_over(b)) {
    if (legs_.is_in_flight(b)) {
      wait_for_leg(b);
    } else if (legs_.next(b) == Leg::update && stepped_) {
      update(b);
    } else if (stepped_ || legs_.next(b) == Leg::all_gather) {
      throw Error("schedule '" + schedule_->name() + "' has not launched the next leg of " +
                  describe(b, buckets_[b], gradients_) + ", " + name_of(*legs_.next(b)));
    } else {
      legs_.drop(b);
      if (--unfinished_ == 0) {
        finish_iteration();
      }
    }
  }
}

// Buckets of parameters that no module was seen to need.
void Reducer::begin_forward_on_journey() {
  if (!is_on_journey()) {
    return;
  }
  if (!stepped_) {
    finish_journeys();
    return;
  }
  for (const size_t b : needed_by_none_) {
    finish_journey(b);
  }
}

}  // namespace dpcore
