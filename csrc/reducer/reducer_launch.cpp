// The path of a bucket in its first phase: it is launched in the common order of the ranks,
// awaited, and its gradients are handed out. reducer_phases.cpp continues from there.
//
// If buckets lend each other their memory (bucket/flat_memory.h), the launch of a bucket waits for
// the one that used its memory before. Every rank has launched that one earlier, so ranks that
// launch in the same order cannot deadlock. The wait has the same deadline and errors as any wait
// for a bucket.
//
// reducer.cpp opens and ends the step around this.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "reducer/bucket/flat_memory.h"
#include "reducer/reducer.h"

namespace dpcore {

// ---- the launch ------------------------------------------------------------------------------

void Reducer::launch(std::span<const size_t> buckets, Launch how) {
  if (buckets.size() == 1 && (progress_.next(buckets.front()) != progress_.phases().first() ||
                              may_follow(buckets.front()))) {
    launch_next_phase(buckets.front(), how);
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
      refuse(in_words(b) + ", of which " + std::to_string(bucket.missing) +
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
  if (progress_.phases().first() == Phase::reduce_scatter) {
    refuse_as_one("in these phases each bucket is scattered by itself");
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
  if (norms_.is_on()) {
    try {
      norms_.start();
    } catch (...) {
      raise_about(GradientNorms::kInWords);
    }
  }
}

// Before the bucket at this place of the order of launching is filled.
void Reducer::make_room(size_t at) {
  if (whole_buckets_ == 0 || at < whole_buckets_) {
    return;
  }
  const size_t before = order_[at - whole_buckets_];
  if (buckets_[before].state == Bucket::launched) {
    wait(before);
  }
}

// All buckets that travel in the same operation.
std::span<Bucket> Reducer::sent_with(const Bucket& bucket) {
  return std::span(buckets_).subspan(bucket.first_joined,
                                     buckets_[bucket.first_joined].joined_count);
}

void Reducer::send(std::span<Bucket> together, const Launch& how) {
  const size_t first = together.front().first_joined;
  BucketCall call;
  call.collective =
      progress_.phases().begins_with_half() ? Collective::reduce_scatter : Collective::all_reduce;
  call.layout = salted(together.size() == 1 ? together.front().layout : joined_layout(together));
  call.priority = how.priority;
  call.background = how.background;
  call.algorithm = how.algorithm.get();
  call.words = words_.leave_with(hook_ != nullptr, iteration_.step());
  call.finds_not_finite = settings_.finds_mistakes;
  const int64_t now = now_ns();
  for (size_t i = 0; i < together.size(); ++i) {
    Bucket& bucket = together[i];
    StepRecord::OfBucket& record = record_.buckets[first + i];
    record.launched_ns = now;
    record.is_sent = true;
    record.sent_bytes =
        bucket.bytes / bucket.flat.element_size() * bucket.travelling().element_size();
    trace_.add_moment("bucket launch", EventKind::launch, first + i, bucket.bytes, now);
    bucket.profiled = trace_.profiled_bucket();
  }
  try {
    for (Bucket& bucket : together) {
      copier_.leave_to_leases(bucket);
      copier_.fill(bucket);
      if (norms_.is_on()) {
        norms_.add_own(bucket.travelling());
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
    raise_about(in_words(first));
  }
  for (Bucket& bucket : together) {
    bucket.state = Bucket::launched;
  }
}

void Reducer::skip(size_t b) {
  if (schedule_->is_exact()) {
    throw Error("schedule '" + schedule_->name() + "': skip of " + in_words(b) +
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
  record_.buckets[b].launched_ns = now_ns();
  finish_first_phase(bucket, 0);
  launch_in_order();
}

// ---- the wait --------------------------------------------------------------------------------

bool Reducer::is_done(const Bucket& bucket) const {
  return !hook_ && communicator_->is_done(bucket.first_joined);
}

bool Reducer::is_over(size_t b) const {
  if (progress_.is_gathering(b)) {
    return communicator_->is_done(slot_of_gather(b));
  }
  const Bucket& bucket = buckets_.at(b);
  return bucket.state == Bucket::complete || (bucket.state == Bucket::launched && is_done(bucket));
}

size_t Reducer::in_flight() const {
  size_t count = 0;
  for (size_t at = oldest_launched_; at < next_launch_; ++at) {
    const Bucket& bucket = buckets_[order_[at]];
    const bool is_first = bucket.first_joined == order_[at];
    count += bucket.state == Bucket::launched && is_first && !is_done(bucket) ? 1 : 0;
    count +=
        progress_.is_gathering(order_[at]) && !communicator_->is_done(slot_of_gather(order_[at]))
            ? 1
            : 0;
  }
  return count;
}

double Reducer::elapsed_ms() const {
  return static_cast<double>(now_ns() - record_.first_gradient_ns) * 1e-6;
}

// Tells the schedule of buckets that have become averages while backward went on.
void Reducer::tell_of_complete_buckets() {
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

void Reducer::wait(size_t b) {
  Bucket& bucket = buckets_.at(b);
  if (bucket.state == Bucket::complete) {
    wait_for_gather(b);
    return;
  }
  if (bucket.state == Bucket::filling) {
    communicator_->check_usable();  // after a failure nothing is sent
    throw Error("schedule '" + schedule_->name() + "': wait for " + in_words(b) +
                ", which is not launched, or comes after one in order() that is not");
  }
  const std::span<Bucket> together = sent_with(bucket);
  const size_t first = bucket.first_joined;
  int64_t over_ns = 0;
  try {
    const StepRecord::Wait waiting(record_);
    if (hook_) {
      hook_->wait(b, bucket.flat);
    } else {
      communicator_->wait(first);
      over_ns = communicator_->over_ns(first);
      if (together.size() > 1) {
        take_apart(together);
      }
      if (const NotFinite found = communicator_->not_finite(first); found.is_found()) {
        const bool is_half = progress_.phases().begins_with_half();
        not_finite_.note(found, together, gradients_, iteration_.step(),
                         is_half ? FirstNotFinite::Part{rank(), communicator_->world()}
                                 : FirstNotFinite::Part{});
      }
    }
  } catch (...) {
    raise_about(in_words(first));
  }
  for (Bucket& member : together) {
    finish_first_phase(member, over_ns);
  }
  if (listens(LaunchSchedule::bucket_complete) && progress_.phases().first() == Phase::all_reduce) {
    for (size_t i = 0; i < together.size(); ++i) {
      schedule_->on_bucket_complete(*this, first + i);
    }
  }
  wait_for_gather(b);
}

void Reducer::wait_for_all() {
  for (const size_t b : order_) {
    wait(b);
  }
}

// `over_ns`: when the operation was over; 0 where nothing can tell.
void Reducer::finish_first_phase(Bucket& bucket, int64_t over_ns) {
  const auto b = static_cast<size_t>(&bucket - buckets_.data());
  bucket.state = Bucket::complete;
  bucket.profiled.reset();
  StepRecord::OfBucket& record = record_.buckets[b];
  record.complete_ns = now_ns();
  record.over_ns = over_ns != 0 ? over_ns : record.complete_ns;
  if (bucket.skipped) {
    advance(b, Next::none);
    return;
  }
  const bool is_half = progress_.phases().begins_with_half();
  if (is_half && bucket.kept.defined()) {
    keep_part(bucket, rank());
  }
  if (norms_.is_on()) {
    norms_.add_mean(is_half ? part_of(b) : bucket.travelling());
  }
  if (!is_half) {
    hand_out(bucket);
  }
  advance(b);
}

// A rank without inputs has lent zeros: its own gradients are not of this iteration.
void Reducer::hand_out(Bucket& bucket) {
  if (iteration_.arrived > 0) {
    copier_.hand_out(bucket, hook_ == nullptr);
  }
}

void Reducer::abandon() {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    if (bucket.state == Bucket::launched && !bucket.skipped) {
      if (hook_) {
        hook_->abandon(b);
      } else if (bucket.first_joined == b) {
        communicator_->abandon(b, bucket.joined_count > 1 ? bucket.joined : bucket.travelling());
      }
    }
    if (progress_.is_gathering(b)) {
      communicator_->abandon(slot_of_gather(b), gathered(b));
    }
  }
}

// In the slot behind those of the buckets. The memory is kept for the next call.
std::vector<double> Reducer::max_over_ranks(std::vector<double> values) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(values.size());
  const at::Tensor here = at::from_blob(values.data(), {count}, at::kDouble);
  if (!measured_.defined() || measured_.numel() < count) {
    measured_ = communicator_->allocate(values.size(), at::kDouble, device_of(gradients_));
  }
  const at::Tensor everywhere =
      measured_.numel() == count ? measured_ : measured_.narrow(0, 0, count);
  everywhere.copy_(here);
  const size_t slot = buckets_.size();
  try {
    communicator_->start(slot, everywhere,
                         {.op = ReduceOp::max, .layout = settings_.tag, .background = false});
    const StepRecord::Wait waiting(record_);
    communicator_->wait(slot);
  } catch (...) {
    raise_about("max_over_ranks of schedule '" + schedule_->name() + "'");
  }
  here.copy_(everywhere);
  return values;
}

}  // namespace dpcore
