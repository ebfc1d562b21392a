// The phases of a bucket after its first (phases/phases.h): the second half of an all-reduce, and
// the optimizer's update.
//
//   backward         first phases, in the background
//   update_steps()   the optimizer has recorded its step; zero1 updates and gathers
//   forward          each module waits for what it needs, by the schedule's forward_begin
//   end of forward   all remaining phases
//
// If the program skips the step, the phases end where the update would have been. The first phase
// is in reducer_launch.cpp.
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "reducer/bucket/flat_memory.h"
#include "reducer/reducer.h"

namespace dpcore {

void Reducer::forward_of_module_begins(size_t module) {
  if (listens(LaunchSchedule::forward_begin) && is_in_flight()) {
    in_forward_ = true;
    const auto afterwards = c10::make_scope_exit([this] { in_forward_ = false; });
    schedule_->on_forward_begin(*this, module);
  }
}

void Reducer::wait_for_what_no_module_needs() {
  if (!is_in_flight()) {
    return;
  }
  if (!iteration_.stepped) {
    finish_phases();
    return;
  }
  for (const size_t b : needed_by_none_) {
    finish_phases_of(b);
  }
}

// At the end of backward every first phase is launched, on all ranks in the same order, so the next
// one may be launched behind it.
bool Reducer::may_follow(size_t b) const {
  return backward_ends_ && progress_.phases().gathers_gradients() &&
         buckets_.at(b).state == Bucket::launched;
}

void Reducer::launch_next_phase(size_t b, const Launch& how) {
  const auto refuse = [&](const std::string& why) {
    throw Error("schedule '" + schedule_->name() + "': launch of " + in_words(b) + why);
  };
  if (progress_.is_over(b) || progress_.is_gathering(b)) {
    return;
  }
  const bool follows = may_follow(b);
  if (!follows && progress_.next(b) != Phase::all_gather) {
    refuse(", whose next phase is update: call control.update()");
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
  call.algorithm = how.algorithm.get();
  if (follows) {
    call.after = b;
  }
  call.collective = Collective::all_gather;
  call.layout = salted(Fnv().add(bucket.layout).add(uint64_t{1}).value());
  StepRecord::OfBucket& record = record_.buckets[b];
  record.gather_launched_ns = now_ns();
  record.gathered_bytes = bucket.bytes;
  trace_.add_moment("bucket launch", EventKind::launch, b, bucket.bytes, record.gather_launched_ns);
  try {
    communicator_->start(slot_of_gather(b), gathered(b), call);
    progress_.set_gathering(b, true);
  } catch (...) {
    raise_about(in_words(b));
  }
}

void Reducer::wait_for_gather(size_t b) {
  if (!progress_.is_gathering(b)) {
    return;
  }
  Bucket& bucket = buckets_[b];
  int64_t over_ns = 0;
  try {
    const StepRecord::Wait waiting(record_);
    communicator_->wait(slot_of_gather(b));
    progress_.set_gathering(b, false);
    over_ns = communicator_->over_ns(slot_of_gather(b));
  } catch (...) {
    const bool of_parameters = progress_.phases().updates_parts();
    raise_about(in_words(b), of_parameters ? which_are_new() : "");
  }
  StepRecord::OfBucket& record = record_.buckets[b];
  record.complete_ns = now_ns();
  record.gather_launched_ns = std::max(record.gather_launched_ns, record.over_ns);
  record.gather_over_ns = over_ns != 0 ? over_ns : record.complete_ns;
  if (!progress_.phases().updates_parts()) {
    hand_out(bucket);
    if (listens(LaunchSchedule::bucket_complete)) {
      schedule_->on_bucket_complete(*this, b);
    }
  }
  advance(b);
}

// Of the parameters, when a gather of them has failed.
std::string Reducer::which_are_new() const {
  std::string old;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!progress_.is_over(b)) {
      old += (old.empty() ? "" : ", ") + std::to_string(b);
    }
  }
  return ". The parameters of this rank lie between step " + std::to_string(iteration_.completed) +
         " and step " + std::to_string(iteration_.step()) + ": buckets " + old +
         " are not whole, the others are new. Go on from a checkpoint";
}

void Reducer::update(std::span<const size_t> buckets) {
  if (!progress_.phases().updates()) {
    throw Error("schedule '" + schedule_->name() +
                "': update(), though its phases have no update; the program steps by itself");
  }
  updated_.clear();
  for (const size_t b : buckets) {
    const bool is_named_twice = std::find(updated_.begin(), updated_.end(), b) != updated_.end();
    if (is_named_twice || progress_.has_updated(b) || !iteration_.stepped) {
      continue;
    }
    if (progress_.next(b) != Phase::update) {
      throw Error("schedule '" + schedule_->name() + "': update of " + in_words(b) +
                  " before its " + name_of(*progress_.next(b)) +
                  " is over; wait for the bucket first");
    }
    updated_.push_back(b);
  }
  if (updated_.empty()) {
    return;
  }
  StepTrace::Compute span;
  if (trace_.is_recorded()) {
    trace_.begin_compute(span, "update", iteration_.number);
  }
  callbacks_.update(updated_);
  trace_.end_compute(span, "update", iteration_.number);
  for (const size_t b : updated_) {
    advance(b);
  }
}

bool Reducer::update_steps() {
  ++update_steps_;
  if (!is_in_flight()) {
    return false;
  }
  if (progress_.phases().updates_parts() && communicator_->carries_words()) {
    wait(order_.front());
    hear_words(iteration_.step());  // before parts of different models become one
  }
  iteration_.stepped = true;
  if (listens(LaunchSchedule::optimizer_step)) {
    schedule_->on_optimizer_step(*this);
  }
  if (progress_.phases().updates_parts()) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (!progress_.is_over(b) && !progress_.is_gathering(b)) {
        throw Error("schedule '" + schedule_->name() + "' has not launched all_gather of " +
                    in_words(b) + " by the end of optimizer_step");
      }
    }
  } else if (!defers_) {
    finish_phases();  // the program has read the gradients, so all of them are there
  }
  return true;
}

void Reducer::finish_phases() {
  if (!is_in_flight()) {
    return;
  }
  for (const size_t b : order_) {
    finish_phases_of(b);
  }
}

void Reducer::finish_phases_of(size_t b) {
  wait(b);
  while (!progress_.is_over(b)) {
    if (progress_.is_gathering(b)) {
      wait_for_gather(b);
    } else if (progress_.next(b) == Phase::update && iteration_.stepped) {
      update(b);
    } else if (iteration_.stepped || progress_.next(b) == Phase::all_gather) {
      throw Error("schedule '" + schedule_->name() + "' has not launched the next phase of " +
                  in_words(b) + ", " + name_of(*progress_.next(b)));
    } else {
      advance(b, Next::none);
    }
  }
}

// A rank that has left out a step is told from the others by its layouts.
uint64_t Reducer::salted(uint64_t layout) const {
  return update_steps_ == 0 ? layout : Fnv().add(layout).add(update_steps_).value();
}

// What an all_gather after the first phase sends: parameters, or gradients.
const at::Tensor& Reducer::gathered(size_t b) {
  return progress_.phases().updates_parts() ? parameters_of(b) : buckets_[b].flat;
}

at::Tensor Reducer::part_of(size_t b) const {
  return part_of_rank(buckets_.at(b), rank(), communicator_->world());
}

// Made when it is asked for first.
const at::Tensor& Reducer::parameters_of(size_t b) {
  Bucket& bucket = buckets_.at(b);
  if (!bucket.parameters.defined()) {
    bucket.parameters = communicator_->allocate(static_cast<size_t>(bucket.flat.numel()),
                                                bucket.flat.scalar_type(), bucket.flat.device());
  }
  return bucket.parameters;
}

}  // namespace dpcore
