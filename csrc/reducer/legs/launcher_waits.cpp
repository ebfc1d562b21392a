// Waiting for buckets, and what follows when one is complete. See launcher.h.
#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "reducer/bucket/flat_memory.h"
#include "reducer/legs/launcher.h"

namespace dpcore {

bool Launcher::is_done(const Bucket& bucket) const {
  return !hook_ && reducer_.communicator->is_done(bucket.first_joined);
}

bool Launcher::is_over(size_t b) const {
  if (legs_.is_in_flight(b)) {
    return legs_.is_done(b);
  }
  const Bucket& bucket = reducer_.buckets.at(b);
  return bucket.state == Bucket::complete || (bucket.state == Bucket::launched && is_done(bucket));
}

size_t Launcher::in_flight() const {
  size_t count = 0;
  for (size_t at = oldest_launched_; at < next_launch_; ++at) {
    const Bucket& bucket = reducer_.buckets[order_[at]];
    const bool is_first = bucket.first_joined == order_[at];
    count += bucket.state == Bucket::launched && is_first && !is_done(bucket) ? 1 : 0;
    count += legs_.is_in_flight(order_[at]) && !legs_.is_done(order_[at]) ? 1 : 0;
  }
  return count;
}

// Tells the schedule of buckets that have become averages while backward went on.
void Launcher::notice_complete() {
  for (size_t at = oldest_launched_; at < next_launch_; ++at) {
    const size_t b = order_[at];
    if (reducer_.buckets[b].state == Bucket::launched && is_done(reducer_.buckets[b])) {
      wait(b);
    }
    if (reducer_.buckets[b].state == Bucket::complete && at == oldest_launched_) {
      ++oldest_launched_;
    }
  }
}

void Launcher::wait(size_t b) {
  Bucket& bucket = reducer_.buckets.at(b);
  if (bucket.state == Bucket::complete) {
    wait_for_leg(b);
    return;
  }
  if (bucket.state == Bucket::filling) {
    reducer_.communicator->check_usable();  // after a failure nothing is sent
    throw Error("schedule '" + schedule_->name() + "': wait for " + in_words(b) +
                ", which is not launched, or comes after one in order() that is not");
  }
  const std::span<Bucket> together = sent_with(bucket);
  const size_t first = bucket.first_joined;
  int64_t over_ns = 0;
  try {
    const StepWatch::Wait waiting(reducer_.watch);
    if (hook_) {
      hook_->wait(b, bucket.flat);
    } else {
      reducer_.communicator->wait(first);
      over_ns = reducer_.communicator->over_ns(first);
      if (together.size() > 1) {
        take_apart(together);
      }
    }
  } catch (...) {
    raise_about(in_words(first));
  }
  for (Bucket& member : together) {
    finish_bucket(member);
    member.over_ns = over_ns != 0 ? over_ns : member.complete_ns;
  }
  end_iteration_if_over();
  if (listens(LaunchSchedule::bucket_complete) && legs_.journey().first() == Leg::all_reduce) {
    for (size_t i = 0; i < together.size(); ++i) {
      schedule_->on_bucket_complete(*this, first + i);
    }
  }
  wait_for_leg(b);
}

void Launcher::wait_for_all() {
  for (const size_t b : order_) {
    wait(b);
  }
}

void Launcher::finish_bucket(Bucket& bucket) {
  bucket.state = Bucket::complete;
  bucket.profiled.reset();
  bucket.complete_ns = now_ns();
  const auto b = static_cast<size_t>(&bucket - reducer_.buckets.data());
  if (bucket.skipped) {
    legs_.drop(b);
    --reducer_.iteration.unfinished;
    return;
  }
  if (reducer_.norms.is_on()) {
    reducer_.norms.add_mean(bucket.travelling());
  }
  if (legs_.journey().first() == Leg::all_reduce) {
    hand_out(bucket);
  } else if (bucket.kept.defined()) {
    keep_part(bucket, reducer_.communicator->rank());
  }
  advance(b);
}

// A rank without inputs has lent zeros: its own gradients are not of this iteration.
void Launcher::hand_out(Bucket& bucket) {
  if (reducer_.iteration.arrived > 0) {
    reducer_.copier.hand_out(bucket, hook_ == nullptr);
  }
}

}  // namespace dpcore
