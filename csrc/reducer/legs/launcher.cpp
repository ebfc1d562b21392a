// Legs that fill buckets: see launcher.h.
#include "reducer/legs/launcher.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "reducer/bucket/flat_memory.h"
#include "reducer/plan/bucket_plan.h"

namespace dpcore {

Launcher::Launcher(View reducer, std::vector<std::vector<size_t>> modules,
                   std::shared_ptr<LaunchSchedule> schedule)
    : reducer_(std::move(reducer)),
      modules_(std::move(modules)),
      schedule_(std::move(schedule)),
      listens_(schedule_->listens()),
      legs_(schedule_->journey(), reducer_.communicator),
      whole_buckets_(schedule_->whole_buckets()) {
  if (whole_buckets_ > 0 && !legs_.journey().updates_parts()) {
    throw Unsupported("schedule '" + schedule_->name() +
                      "': whole_buckets() is for the journey reduce_scatter, update, all_gather; "
                      "on others each rank needs all averages");
  }
}

void Launcher::use_schedule(std::shared_ptr<LaunchSchedule> schedule) {
  schedule_ = std::move(schedule);
  listens_ = schedule_->listens();
  order_ = schedule_->order(reducer_.buckets.size());
}

void Launcher::use_hook(std::unique_ptr<BucketHook> hook) {
  hook_ = std::move(hook);
  if (hook_) {
    hook_->buckets_changed(reducer_.buckets.size());
  }
}

const std::vector<size_t>& Launcher::make_order(size_t buckets) {
  order_ = schedule_->order(buckets);
  if (!is_permutation_of(order_, buckets)) {
    throw Unsupported("schedule '" + schedule_->name() + "': order(" + std::to_string(buckets) +
                      ") must name every bucket from 0 on exactly once");
  }
  return order_;
}

void Launcher::buckets_changed() {
  const size_t buckets = reducer_.buckets.size();
  requested_.assign(buckets, std::nullopt);
  legs_.buckets_changed(buckets);
  find_order_of_need();
  reducer_.communicator->reserve(legs_.slots());
  if (hook_) {
    hook_->buckets_changed(buckets);
  }
}

void Launcher::begin_iteration() {
  next_launch_ = 0;
  oldest_launched_ = 0;
  reducer_.iteration.unfinished = reducer_.buckets.size();
  reducer_.iteration.stepped = false;
  legs_.begin();
  std::fill(requested_.begin(), requested_.end(), std::nullopt);
}

void Launcher::backward_ends() {
  if (listens(LaunchSchedule::backward_end)) {
    backward_ends_ = true;
    const auto is_told = c10::make_scope_exit([this] { backward_ends_ = false; });
    schedule_->on_backward_end(*this);
  }
  if (next_launch_ < order_.size()) {
    throw Error("schedule '" + schedule_->name() + "' has not launched " +
                in_words(order_[next_launch_]) +
                " by the end of backward; launch or skip every bucket");
  }
}

void Launcher::abandon() {
  for (size_t b = 0; b < reducer_.buckets.size(); ++b) {
    const Bucket& bucket = reducer_.buckets[b];
    if (bucket.state == Bucket::launched && !bucket.skipped) {
      if (hook_) {
        hook_->abandon(b);
      } else if (bucket.first_joined == b) {
        reducer_.communicator->abandon(
            b, bucket.joined_count > 1 ? bucket.joined : bucket.travelling());
      }
    }
    if (legs_.is_in_flight(b)) {
      legs_.abandon(b, bucket);
    }
  }
}

double Launcher::elapsed_ms() const {
  return static_cast<double>(now_ns() - reducer_.iteration.first_gradient_ns) * 1e-6;
}

void Launcher::launch(std::span<const size_t> buckets, Launch how) {
  if (buckets.size() == 1 &&
      (legs_.next(buckets.front()) != legs_.journey().first() || may_follow(buckets.front()))) {
    launch_next_leg(buckets.front(), how);
    return;
  }
  check_launch(buckets);
  size_t requested = 0;
  for (const size_t b : buckets) {
    requested += requested_[b] || reducer_.buckets[b].skipped ? 1 : 0;
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
    reducer_.buckets[b].first_joined =
        hook_ ? b : buckets.front();  // a hook gets each bucket by itself
  }
  reducer_.buckets[buckets.front()].joined_count = hook_ ? 1 : buckets.size();
  launch_in_order();
}

// Throws what a schedule did wrong.
void Launcher::check_launch(std::span<const size_t> buckets) const {
  const auto refuse = [&](const std::string& what) {
    throw Error("schedule '" + schedule_->name() + "': launch of " + what);
  };
  for (const size_t b : buckets) {
    if (const Bucket& bucket = reducer_.buckets.at(b); bucket.missing > 0) {
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
    const at::Tensor& one = reducer_.buckets[buckets[i - 1]].flat;
    const at::Tensor& other = reducer_.buckets[buckets[i]].flat;
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

void Launcher::launch_in_order() {
  while (next_launch_ < order_.size()) {
    const size_t b = order_[next_launch_];
    if (reducer_.buckets[b].skipped) {
      ++next_launch_;
      continue;
    }
    if (!requested_[b]) {
      return;
    }
    make_room(next_launch_);
    const std::span<Bucket> together = sent_with(reducer_.buckets[b]);
    next_launch_ += together.size();
    send(together, *requested_[b]);
  }
  if (reducer_.norms.is_on()) {
    try {
      reducer_.norms.start();
    } catch (...) {
      raise_about(GradientNorms::kInWords);
    }
  }
}

// Before the bucket at this place of the order of launching is filled.
void Launcher::make_room(size_t at) {
  if (whole_buckets_ == 0 || at < whole_buckets_) {
    return;
  }
  const size_t before = order_[at - whole_buckets_];
  if (reducer_.buckets[before].state == Bucket::launched) {
    wait(before);
  }
}

// All buckets that travel in the same operation.
std::span<Bucket> Launcher::sent_with(const Bucket& bucket) {
  return std::span(reducer_.buckets)
      .subspan(bucket.first_joined, reducer_.buckets[bucket.first_joined].joined_count);
}

void Launcher::send(std::span<Bucket> together, Launch how) {
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
    reducer_.trace.note_moment("bucket launch", EventKind::launch, first + i, bucket.bytes, now);
    bucket.profiled = reducer_.trace.profiled_bucket();
  }
  try {
    for (Bucket& bucket : together) {
      reducer_.copier.fill(bucket);
      if (reducer_.norms.is_on()) {
        reducer_.norms.add_own(bucket.travelling());
      }
    }
    if (hook_) {
      hook_->start(first, together.front().flat, call);
    } else {
      reducer_.communicator->start(first,
                                   together.size() == 1 ? together.front().travelling()
                                                        : join(together, *reducer_.communicator),
                                   call);
    }
  } catch (...) {
    raise_about(in_words(first));
  }
  for (Bucket& bucket : together) {
    bucket.state = Bucket::launched;
  }
}

// In the slot that no bucket has. The memory is kept for the next call.
std::vector<double> Launcher::max_over_ranks(std::vector<double> values) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(values.size());
  const at::Tensor here = at::from_blob(values.data(), {count}, at::kDouble);
  if (!measured_.defined() || measured_.numel() < count) {
    measured_ =
        reducer_.communicator->allocate(values.size(), at::kDouble, device_of(reducer_.gradients));
  }
  const at::Tensor everywhere =
      measured_.numel() == count ? measured_ : measured_.narrow(0, 0, count);
  everywhere.copy_(here);
  const size_t slot = reducer_.buckets.size();
  try {
    reducer_.communicator->start(
        slot, everywhere, {.op = ReduceOp::max, .layout = reducer_.tag, .background = false});
    const StepWatch::Wait waiting(reducer_.watch);
    reducer_.communicator->wait(slot);
  } catch (...) {
    raise_about("max_over_ranks of schedule '" + schedule_->name() + "'");
  }
  here.copy_(everywhere);
  return values;
}

void Launcher::skip(size_t b) {
  if (schedule_->is_exact()) {
    throw Error("schedule '" + schedule_->name() + "': skip of " + in_words(b) +
                ", whose gradients then stay each rank's own, though its is_exact() says that "
                "gradients are averaged; launch the bucket, or return False from is_exact()");
  }
  leave_out(b);
}

void Launcher::leave_out(size_t b) {
  Bucket& bucket = reducer_.buckets.at(b);
  if (bucket.state != Bucket::filling || requested_[b]) {
    return;
  }
  bucket.skipped = true;
  bucket.launched_ns = now_ns();
  finish_bucket(bucket);
  launch_in_order();
}

}  // namespace dpcore
