// The way of a bucket: a schedule asks for it, it is sent in the order that all ranks have,
// somebody waits for it, and its gradients are handed out.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "reducer/bucket/joined.h"
#include "reducer/bucket/lent.h"
#include "reducer/reducer.h"

namespace dpcore {

double Reducer::elapsed_ms() const {
  return static_cast<double>(now_ns() - first_gradient_ns_) * 1e-6;
}

void Reducer::launch(std::span<const size_t> buckets, Launch how) {
  if (buckets.size() == 1 && legs_.next(buckets.front()) != legs_.journey().first()) {
    launch_next_leg(buckets.front(), how);
    return;
  }
  check_launch(buckets);
  size_t requested = 0;
  for (const size_t b : buckets) {
    requested += requested_[b] || buckets_[b].skipped ? 1 : 0;
  }
  if (requested == buckets.size()) {
    return;
  }
  if (requested > 0) {
    throw Error("schedule '" + schedule_->name() + "': launch of buckets " +
                std::to_string(buckets.front()) + " to " + std::to_string(buckets.back()) +
                " as one, of which some are launched already");
  }
  for (const size_t b : buckets) {
    requested_[b] = how;
    buckets_[b].first_joined = hook_ ? b : buckets.front();  // a hook gets each bucket by itself
  }
  buckets_[buckets.front()].joined_count = hook_ ? 1 : buckets.size();
  launch_in_order();
}

// Throws what a schedule did wrong.
void Reducer::check_launch(std::span<const size_t> buckets) const {
  const auto refuse = [&](const std::string& what) {
    throw Error("schedule '" + schedule_->name() + "': launch of " + what);
  };
  for (const size_t b : buckets) {
    if (const Bucket& bucket = buckets_.at(b); bucket.missing > 0) {
      refuse(describe(b, bucket, gradients_) + ", of which " + std::to_string(bucket.missing) +
             " gradients are missing; launch it after bucket_ready, or ask is_complete()");
    }
  }
  if (buckets.size() == 1) {
    return;
  }
  const auto refuse_as_one = [&](const std::string& why) {
    std::string list;
    for (const size_t b : buckets) {
      list += (list.empty() ? "" : ", ") + std::to_string(b);
    }
    refuse("[" + list + "] as one operation: " + why);
  };
  if (buckets.empty()) {
    refuse_as_one("the list is empty");
  }
  for (size_t i = 1; i < buckets.size(); ++i) {
    if (buckets[i] != buckets[i - 1] + 1) {
      refuse_as_one("only neighbours can go as one, such as [3, 4, 5]");
    }
    const at::Tensor& one = buckets_[buckets[i - 1]].flat;
    const at::Tensor& other = buckets_[buckets[i]].flat;
    if (one.scalar_type() != other.scalar_type() || one.device() != other.device()) {
      refuse_as_one("they hold gradients of different types or devices");
    }
  }
  if (legs_.journey().first() == Leg::reduce_scatter) {
    refuse_as_one("on this journey each bucket is scattered by itself");
  }
  const auto begin =
      std::find_first_of(order_.begin(), order_.end(), buckets.begin(), buckets.end());
  const auto count = static_cast<ptrdiff_t>(buckets.size());
  if (order_.end() - begin < count ||
      std::any_of(
          begin, begin + count,
          [&](size_t b) { return b < buckets.front() || b > buckets.back(); })) {
    refuse_as_one("in order(), others come between them");
  }
}

void Reducer::launch_in_order() {
  while (next_launch_ < order_.size()) {
    const size_t b = order_[next_launch_];
    if (buckets_[b].skipped) {
      ++next_launch_;
      continue;
    }
    if (!requested_[b]) {
      return;
    }
    make_room(next_launch_);
    const std::span<Bucket> together = sent_with(buckets_[b]);
    next_launch_ += together.size();
    send(together, *requested_[b]);
  }
  if (measures_norms_) {
    start_norms();
  }
}

// All buckets that travel in the same operation.
std::span<Bucket> Reducer::sent_with(const Bucket& bucket) {
  return std::span(buckets_).subspan(bucket.first_joined,
                                     buckets_[bucket.first_joined].joined_count);
}

void Reducer::send(std::span<Bucket> together, Launch how) {
  const size_t first = together.front().first_joined;
  BucketCall call;
  call.collective = legs_.first_collective();
  call.layout = salted(together.size() == 1 ? together.front().layout : joined_layout(together));
  call.priority = how.priority;
  call.background = how.background;
  const int64_t now = now_ns();
  for (size_t i = 0; i < together.size(); ++i) {
    Bucket& bucket = together[i];
    bucket.launched_ns = now;
    note_moment("bucket launch", EventKind::launch, first + i, bucket.bytes, now);
    bucket.state = Bucket::launched;
    bucket.profiled = profiled_bucket();
  }
  try {
    for (Bucket& bucket : together) {
      come_to_this_stream(bucket);
      fill_narrow(bucket);
      fill_lent(bucket);
      if (measures_norms_) {
        norms_->add_own(bucket.travelling());
      }
    }
    if (hook_) {
      hook_->start(first, together.front().flat, call);
    } else {
      communicator_->start(
          first,
          together.size() == 1 ? together.front().travelling() : join(together, *communicator_),
          call);
    }
  } catch (...) {
    raise_with_bucket(first);
  }
}

bool Reducer::is_done(const Bucket& bucket) const {
  return !hook_ && communicator_->is_done(bucket.first_joined);
}

size_t Reducer::in_flight() const {
  size_t count = 0;
  for (size_t at = oldest_launched_; at < next_launch_; ++at) {
    const Bucket& bucket = buckets_[order_[at]];
    const bool is_first = bucket.first_joined == order_[at];
    count += bucket.state == Bucket::launched && is_first && !is_done(bucket) ? 1 : 0;
    count += legs_.is_in_flight(order_[at]) && !legs_.is_done(order_[at]) ? 1 : 0;
  }
  return count;
}

// In the slot that no bucket has. The memory is kept for the next call.
std::vector<double> Reducer::max_over_ranks(std::vector<double> values) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(values.size());
  const at::Tensor here = at::from_blob(values.data(), {count}, at::kDouble);
  if (!measured_.defined() || measured_.numel() < count) {
    measured_ = communicator_->allocate(values.size(), at::kDouble, used_anywhere_.device());
  }
  const at::Tensor everywhere =
      measured_.numel() == count ? measured_ : measured_.narrow(0, 0, count);
  everywhere.copy_(here);
  const size_t slot = buckets_.size();
  try {
    communicator_->start(slot, everywhere,
                         {.op = ReduceOp::max, .layout = settings_.tag, .background = false});
    const StepWatch::Wait waiting(watch_);
    communicator_->wait(slot);
  } catch (...) {
    raise_about("max_over_ranks of schedule '" + schedule_->name() + "'");
  }
  here.copy_(everywhere);
  return values;
}

// Tells the schedule of buckets that have become averages while backward went on.
void Reducer::notice_complete() {
  for (size_t at = oldest_launched_; at < next_launch_; ++at) {
    const size_t b = order_[at];
    if (buckets_[b].state == Bucket::launched && is_done(buckets_[b])) {
      wait(b);
    }
    if (buckets_[b].state == Bucket::complete && at == oldest_launched_) {
      ++oldest_launched_;
    }
  }
}

void Reducer::skip(size_t b) {
  if (schedule_->is_exact()) {
    throw Error("schedule '" + schedule_->name() + "': skip of " +
                describe(b, buckets_.at(b), gradients_) +
                ", whose gradients then stay each rank's own, though its is_exact() says that "
                "gradients are averaged; launch the bucket, or return False from is_exact()");
  }
  leave_out(b);
}

void Reducer::leave_out(size_t b) {
  Bucket& bucket = buckets_.at(b);
  if (bucket.state != Bucket::filling || requested_[b]) {
    return;
  }
  bucket.skipped = true;
  bucket.launched_ns = now_ns();
  finish_bucket(bucket);
  launch_in_order();
}

void Reducer::wait(size_t b) {
  Bucket& bucket = buckets_.at(b);
  if (bucket.state == Bucket::complete) {
    wait_for_leg(b);
    return;
  }
  if (bucket.state == Bucket::filling) {
    throw Error("schedule '" + schedule_->name() + "': wait for " +
                describe(b, bucket, gradients_) +
                ", which is not launched, or comes after one in order() that is not");
  }
  const std::span<Bucket> together = sent_with(bucket);
  const size_t first = bucket.first_joined;
  int64_t over_ns = 0;
  try {
    const StepWatch::Wait waiting(watch_);
    if (hook_) {
      hook_->wait(b, bucket.flat);
    } else {
      communicator_->wait(first);
      over_ns = communicator_->over_ns(first);
      if (together.size() > 1) {
        take_apart(together);
      }
    }
  } catch (...) {
    raise_with_bucket(first);
  }
  for (Bucket& member : together) {
    finish_bucket(member);
    member.over_ns = over_ns != 0 ? over_ns : member.complete_ns;
  }
  if (!open_ && unfinished_ == 0) {
    finish_iteration();
  }
  if (listens(LaunchSchedule::bucket_complete) && legs_.journey().first() == Leg::all_reduce) {
    for (size_t i = 0; i < together.size(); ++i) {
      schedule_->on_bucket_complete(*this, first + i);
    }
  }
}

void Reducer::wait_for_all() {
  for (const size_t b : order_) {
    wait(b);
  }
}

void Reducer::finish_bucket(Bucket& bucket) {
  bucket.state = Bucket::complete;
  bucket.profiled.reset();
  bucket.complete_ns = now_ns();
  const auto b = static_cast<size_t>(&bucket - buckets_.data());
  if (bucket.skipped) {
    legs_.drop(b);
    --unfinished_;
    return;
  }
  if (measures_norms_) {
    norms_->add_mean(bucket.travelling());
  }
  if (legs_.journey().first() == Leg::all_reduce) {
    hand_out(bucket);
  } else if (bucket.kept.defined()) {
    keep_part(bucket, communicator_->rank());
  }
  advance(b);
}

// For torch's profiler, which costs one look when it is off.
std::unique_ptr<at::RecordFunction> Reducer::profiled_bucket() const {
  if (settings_.profiled_as.empty()) {
    return nullptr;
  }
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!callbacks) {
    return nullptr;
  }
  auto record = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  record->_setAsync();
  record->before(settings_.profiled_as);
  return record;
}

}  // namespace dpcore
