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

// ---- slices ----------------------------------------------------------------------------------

// A bucket that is not cut is its only slice.
void Reducer::cut_buckets() {
  std::vector<uint64_t> bytes;
  std::vector<uint64_t> units;
  for (const Bucket& bucket : buckets_) {
    bytes.push_back(bucket.flat.nbytes());
    units.push_back(static_cast<uint64_t>(bucket.flat.element_size()));
  }
  std::vector<Slice> all = slices_of(*schedule_, bytes, units);
  cuts_ = !all.empty();
  refuse_slices_with(hook_.get());
  if (!cuts_) {
    for (const size_t b : order_) {
      all.push_back({.bucket = b, .begin = 0, .end = bytes[b]});
    }
  }
  slices_.clear();
  slices_of_.assign(buckets_.size(), {});
  slice_bytes_.assign(buckets_.size(), {});
  for (const Slice& slice : all) {
    std::vector<size_t>& of_bucket = slices_of_[slice.bucket];
    slice_bytes_[slice.bucket].push_back(slice.end - slice.begin);
    const size_t number = of_bucket.size();
    of_bucket.push_back(slices_.size());
    slices_.push_back({.slice = slice, .number = number});
  }
  const bool has_gathers = progress_.phases().begins_with_half();
  communicator_->reserve(slot_of_gather(has_gathers ? buckets_.size()
                                        : cuts_     ? slices_.size()
                                                    : 0));
}

void Reducer::refuse_slices_with(const BucketHook* hook) const {
  if (hook != nullptr && cuts_) {
    throw Unsupported("schedule '" + schedule_->name() +
                      "' cuts buckets into slices, and a communication hook gets them whole; leave "
                      "out one of the two");
  }
}

// ---- the launch ------------------------------------------------------------------------------

void Reducer::launch(std::span<const size_t> buckets, Launch how) {
  if (buckets.size() == 1 && (progress_.next(buckets.front()) != progress_.phases().first() ||
                              may_follow(buckets.front()))) {
    launch_next_phase(buckets.front(), how);
    return;
  }
  check_launch(buckets);
  if (cuts_) {
    for (const size_t at : slices_of_[buckets.front()]) {
      request(at, how);
    }
    launch_in_order();
    return;
  }
  size_t requested = 0;
  for (const size_t b : buckets) {
    requested += is_requested(b) || buckets_[b].skipped ? 1 : 0;
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
    request(slices_of_[b].front(), how);
    buckets_[b].first_joined = hook_ ? b : buckets.front();  // a hook gets each bucket by itself
  }
  buckets_[buckets.front()].joined_count = hook_ ? 1 : buckets.size();
  launch_in_order();
}

void Reducer::launch_slice(size_t b, size_t slice, Launch how) {
  if (const size_t count = slices_of_.at(b).size(); slice >= count) {
    throw Error("schedule '" + schedule_->name() + "': launch of slice " + std::to_string(slice) +
                " of " + in_words(b) + ", which has " + std::to_string(count) +
                ", numbered from 0");
  }
  if (progress_.next(b) != progress_.phases().first()) {
    launch_next_phase(b, how);
    return;
  }
  check_launch(std::span<const size_t>(&b, 1));
  request(slices_of_[b][slice], how);
  launch_in_order();
}

bool Reducer::is_requested(size_t b) const {
  return std::any_of(slices_of_[b].begin(), slices_of_[b].end(),
                     [this](size_t at) { return slices_[at].requested.has_value(); });
}

// The first request holds.
void Reducer::request(size_t at, const Launch& how) {
  if (!slices_[at].requested) {
    slices_[at].requested = how;
  }
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
  if (cuts_) {
    refuse_as_one("the schedule cuts buckets, which then go by themselves");
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
  while (next_launch_ < slices_.size()) {
    SliceState& next = slices_[next_launch_];
    const Bucket& bucket = buckets_[next.slice.bucket];
    if (bucket.skipped) {
      ++next_launch_;
      continue;
    }
    if (!next.requested) {
      return;
    }
    make_room(next_launch_);
    const std::span<Bucket> together = sent_with(bucket);
    next_launch_ += together.size();
    send(together, next);
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

size_t Reducer::slot_of(const SliceState& slice) const {
  return cuts_ ? slot_of_gather(static_cast<size_t>(&slice - slices_.data()))
               : buckets_[slice.slice.bucket].first_joined;
}

std::string Reducer::in_words(const SliceState& slice) const {
  return (cuts_ ? "slice " + std::to_string(slice.number) + " of " : "") +
         in_words(slice.slice.bucket);
}

// Made once for each place where the bucket travels from.
const at::Tensor& Reducer::memory_of(SliceState& slice) {
  const Bucket& bucket = buckets_[slice.slice.bucket];
  const at::Tensor& whole = bucket.travelling();
  if (!cuts_) {
    return whole;
  }
  const auto unit = static_cast<uint64_t>(bucket.flat.element_size());
  const uint64_t begin = slice.slice.begin / unit;
  const auto* address =
      static_cast<const std::byte*>(whole.const_data_ptr()) + begin * whole.element_size();
  at::Tensor& memory = slice.memory;
  if (!memory.defined() || memory.const_data_ptr() != address ||
      memory.scalar_type() != whole.scalar_type()) {
    const at::NoGradGuard no_grad;
    memory = whole.narrow(0, static_cast<int64_t>(begin),
                          static_cast<int64_t>(slice.slice.end / unit - begin));
  }
  return memory;
}

void Reducer::send(std::span<Bucket> together, SliceState& slice) {
  const size_t first = together.front().first_joined;
  const Launch& how = *slice.requested;
  const bool begins = together.front().state == Bucket::filling;  // no slice has gone before
  BucketCall call;
  call.collective =
      progress_.phases().begins_with_half() ? Collective::reduce_scatter : Collective::all_reduce;
  call.layout = together.size() == 1 ? together.front().layout : joined_layout(together);
  if (cuts_) {
    call.layout = Fnv().add(call.layout).add(slice.slice.begin).add(slice.slice.end).value();
  }
  call.layout = salted(call.layout);
  call.priority = how.priority;
  call.background = how.background;
  call.algorithm = how.algorithm.get();
  call.words = words_.leave_with(hook_ != nullptr, iteration_.step());
  call.finds_not_finite = settings_.finds_mistakes;
  const int64_t now = now_ns();
  for (size_t i = 0; i < together.size(); ++i) {
    Bucket& bucket = together[i];
    const uint64_t bytes = cuts_ ? slice.slice.end - slice.slice.begin : bucket.bytes;
    trace_.add_moment(cuts_ ? "bucket slice" : "bucket launch", EventKind::launch, first + i, bytes,
                      now);
    if (!begins) {
      continue;
    }
    StepRecord::OfBucket& record = record_.buckets[first + i];
    record.launched_ns = now;
    record.is_sent = true;
    record.sent_bytes =
        bucket.bytes / bucket.flat.element_size() * bucket.travelling().element_size();
    bucket.profiled = trace_.profiled_bucket();
  }
  try {
    for (Bucket& bucket : together) {
      if (!begins) {
        continue;
      }
      copier_.leave_to_leases(bucket);
      copier_.fill(bucket);
      if (norms_.is_on()) {
        norms_.add_own(bucket.travelling());
      }
    }
    if (hook_) {
      hook_->start(first, together.front().flat, call);
    } else {
      communicator_->start(slot_of(slice),
                           together.size() == 1 ? memory_of(slice) : join(together, *communicator_),
                           call);
    }
  } catch (...) {
    raise_about(in_words(slice));
  }
  slice.state = Bucket::launched;
  for (size_t i = 0; i < together.size(); ++i) {
    together[i].state = Bucket::launched;
    if (!cuts_) {
      slices_[slices_of_[first + i].front()].state = Bucket::launched;
    }
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
  if (bucket.state != Bucket::filling || is_requested(b)) {
    return;
  }
  bucket.skipped = true;
  record_.buckets[b].launched_ns = now_ns();
  finish_first_phase(b);
  launch_in_order();
}

// ---- the wait --------------------------------------------------------------------------------

bool Reducer::is_done(const SliceState& slice) const {
  return !hook_ && slice.state == Bucket::launched && communicator_->is_done(slot_of(slice));
}

bool Reducer::is_over(size_t b) const {
  if (progress_.is_gathering(b)) {
    return communicator_->is_done(slot_of_gather(b));
  }
  return buckets_.at(b).state == Bucket::complete ||
         std::all_of(slices_of_[b].begin(), slices_of_[b].end(), [this](size_t at) {
           return slices_[at].state == Bucket::complete || is_done(slices_[at]);
         });
}

size_t Reducer::in_flight() const {
  size_t count = 0;
  for (size_t at = oldest_launched_; at < next_launch_; ++at) {
    const size_t b = slices_[at].slice.bucket;
    const bool is_first = buckets_[b].first_joined == b;
    count += slices_[at].state == Bucket::launched && is_first && !is_done(slices_[at]) ? 1 : 0;
    count += progress_.is_gathering(b) && !communicator_->is_done(slot_of_gather(b)) ? 1 : 0;
  }
  return count;
}

double Reducer::elapsed_ms() const {
  return static_cast<double>(now_ns() - record_.first_gradient_ns) * 1e-6;
}

// Tells the schedule of what has become averages while backward went on.
void Reducer::tell_of_complete_buckets() {
  for (size_t at = oldest_launched_; at < next_launch_; ++at) {
    if (is_done(slices_[at])) {
      wait_for_slice(at);
    }
    const bool is_over = buckets_[slices_[at].slice.bucket].state == Bucket::complete ||
                         slices_[at].state == Bucket::complete;
    if (is_over && at == oldest_launched_) {
      ++oldest_launched_;
    }
  }
}

void Reducer::wait(size_t b) {
  for (const size_t at : slices_of_.at(b)) {
    wait_for_slice(at);
  }
  wait_for_gather(b);
}

void Reducer::wait_for_all() {
  for (size_t at = 0; at < slices_.size(); ++at) {
    wait_for_slice(at);
    wait_for_gather(slices_[at].slice.bucket);
  }
}

void Reducer::wait_for_slice(size_t at) {
  SliceState& slice = slices_[at];
  const size_t b = slice.slice.bucket;
  Bucket& bucket = buckets_[b];
  if (bucket.state == Bucket::complete || slice.state == Bucket::complete) {
    return;
  }
  if (slice.state == Bucket::filling) {
    communicator_->check_usable();  // after a failure nothing is sent
    throw Error("schedule '" + schedule_->name() + "': wait for " + in_words(slice) +
                ", which is not launched, or comes after one in " +
                (cuts_ ? "slices()" : "order()") + " that is not");
  }
  const std::span<Bucket> together = sent_with(bucket);
  const size_t first = bucket.first_joined;
  int64_t over_ns = 0;
  try {
    const StepRecord::Wait waiting(record_);
    if (hook_) {
      hook_->wait(b, bucket.flat);
    } else {
      const size_t slot = slot_of(slice);
      communicator_->wait(slot);
      over_ns = communicator_->over_ns(slot);
      if (together.size() > 1) {
        take_apart(together);
      }
      if (NotFinite found = communicator_->not_finite(slot); found.is_found()) {
        const bool is_half = progress_.phases().begins_with_half();
        found.element += slice.slice.begin / static_cast<uint64_t>(bucket.flat.element_size());
        not_finite_.note(found, together, gradients_, iteration_.step(),
                         is_half ? FirstNotFinite::Part{rank(), communicator_->world()}
                                 : FirstNotFinite::Part{});
      }
    }
  } catch (...) {
    raise_about(in_words(slice));
  }
  slice.state = Bucket::complete;
  slice.over_ns = over_ns;
  if (listens(LaunchSchedule::slice_complete)) {
    schedule_->on_slice_complete(*this, b, slice.number);
  }
  if (!has_come(b) || bucket.state == Bucket::complete) {
    return;
  }
  for (size_t member = first; member < first + together.size(); ++member) {
    SliceState& last = slices_[slices_of_[member].back()];
    last.over_ns = std::max(last.over_ns, over_ns);
    finish_first_phase(member);
  }
  if (listens(LaunchSchedule::bucket_complete) && progress_.phases().first() == Phase::all_reduce) {
    for (size_t i = 0; i < together.size(); ++i) {
      schedule_->on_bucket_complete(*this, first + i);
    }
  }
}

// All slices of the bucket are averages.
bool Reducer::has_come(size_t b) const {
  return std::all_of(slices_of_[b].begin(), slices_of_[b].end(),
                     [this](size_t at) { return slices_[at].state == Bucket::complete; });
}

void Reducer::finish_first_phase(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.state = Bucket::complete;
  bucket.profiled.reset();
  StepRecord::OfBucket& record = record_.buckets[b];
  record.complete_ns = now_ns();
  int64_t over_ns = 0;
  for (const size_t at : slices_of_[b]) {
    slices_[at].state = Bucket::complete;
    over_ns = std::max(over_ns, slices_[at].over_ns);
  }
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
  for (SliceState& slice : slices_) {
    const size_t b = slice.slice.bucket;
    const Bucket& bucket = buckets_[b];
    if (slice.state != Bucket::launched) {
      continue;
    }
    if (hook_) {
      hook_->abandon(b);
    } else if (bucket.first_joined == b) {
      communicator_->abandon(slot_of(slice),
                             bucket.joined_count > 1 ? bucket.joined : memory_of(slice));
    }
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
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
