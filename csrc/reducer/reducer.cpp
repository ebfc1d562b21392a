// The begin and end of a step: forward opens it, and its last bucket ends it, at the end of
// backward or later. Before that, how buckets are made and rebuilt.
//
// This file also has the waits for buckets that a schedule leaves in flight at the end of backward,
// and the case that another reducer of the same parameters brings gradients in between. A
// gradient's path to its bucket is in reducer_backward.cpp, the bucket's in reducer_launch.cpp.
#include "reducer/reducer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "reducer/bucket/flat_memory.h"
#include "reducer/plan/bucket_plan.h"
#include "tensors/tensor_memory.h"

namespace dpcore {
namespace {

constexpr size_t kMissingInMessage = 8;

// Autograd has made the parameter a new place to add gradients to, without our hook.
[[noreturn]] void raise_changed(int rank, const Gradient& gradient) {
  const auto in_words = [](const at::TensorOptions& kind) {
    return std::string(c10::toString(c10::typeMetaToScalarType(kind.dtype()))) + " on " +
           kind.device().str();
  };
  const at::TensorOptions now = gradient.parameter.options();
  const std::string what = gradient.kind.type_equal(now)
                               ? " was parametrized, or converted and converted back, after the "
                                 "model was wrapped, so this model no longer hears of its "
                                 "gradients"
                               : " was " + in_words(gradient.kind) +
                                     " when the model was wrapped, and is " + in_words(now) +
                                     " now";
  throw Error("rank " + std::to_string(rank) + ": " + gradient.name + what +
              "; convert and move models before they are wrapped, or call refresh() of the "
              "wrapped model on all ranks after it");
}

}  // namespace

Reducer::Reducer(std::vector<Gradient> gradients, std::vector<std::vector<size_t>> modules,
                 Settings settings, std::shared_ptr<BucketCommunicator> communicator,
                 std::shared_ptr<LaunchSchedule> schedule, Callbacks callbacks)
    : gradients_(std::move(gradients)),
      settings_(std::move(settings)),
      communicator_(std::move(communicator)),
      schedule_(std::move(schedule)),
      callbacks_(std::move(callbacks)),
      norms_(communicator_, device_of(gradients_), settings_.tag),
      copier_(gradients_, buckets_, communicator_, settings_.grad_is_part),
      computed_(gradients_.size()),
      used_(gradients_.size(), communicator_, device_of(gradients_)),
      words_(settings_.finds_mistakes, communicator_, device_of(gradients_), gradients_),
      trace_(communicator_, settings_.traced_as, settings_.profiled_as),
      progress_(schedule_->phases()),
      modules_(std::move(modules)),
      listens_(schedule_->listens()),
      whole_buckets_(schedule_->whole_buckets()) {
  if (progress_.phases().begins_with_half() && !communicator_->can_go_in_halves()) {
    throw Unsupported(
        "the schedule reduces by reduce_scatter and all_gather, which go over dpcore's own "
        "communicators only; pass comm=dpcore.init(), or schedule='priority', which "
        "all-reduces");
  }
  if (whole_buckets_ > 0 && !progress_.phases().updates_parts()) {
    throw Unsupported("schedule '" + schedule_->name() +
                      "': whole_buckets() is for the phases reduce_scatter, update, all_gather; "
                      "with others each rank needs all averages");
  }
  settings_.caps = schedule_->caps(std::move(settings_.caps));
  record_.arrival.reserve(gradients_.size());
  record_.arrival_ns.reserve(gradients_.size());
  undefined_.reserve(gradients_.size());
  sparse_.reserve(gradients_.size());
  // Backward reaches what was registered last first, more or less: good enough to overlap in the
  // first iteration already.
  std::vector<size_t> order(gradients_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  make_buckets(order, false);
  if (settings_.static_graph) {
    set_static_graph();
  }
  std::vector<at::Tensor> parameters;
  for (Gradient& gradient : gradients_) {
    gradient.kind = gradient.parameter.options();
    parameters.push_back(gradient.parameter);
  }
  if (settings_.born && device_of(gradients_).is_cpu()) {
    warm_memory_ = std::make_unique<WarmMemory>(WarmMemory::For::choosers);
    births_ = std::make_shared<BirthPlan>(gradients_, [this](size_t i) { return place_of(i); });
  }
  GradientListener& listener = *this;  // a base that only we may convert to
  hooks_ = std::make_unique<GradientHooks>(parameters, listener);
}

Reducer::~Reducer() {
  if (births_) {
    births_->close();
  }
  hooks_.reset();
  abandon();
  norms_.abandon();
}

// ---- buckets -----------------------------------------------------------------------------------

void Reducer::make_buckets(const std::vector<size_t>& order, bool rebuilding) {
  const bool as_torch_begins = !rebuilding && settings_.caps.size() == 1;
  BucketPlan plan = plan_of(gradients_, order, settings_.caps, as_torch_begins);
  const auto has_members = [](const Bucket& bucket, const std::vector<size_t>& members) {
    return bucket.gradients == members;
  };
  if (std::equal(buckets_.begin(), buckets_.end(), plan.begin(), plan.end(), has_members)) {
    return;
  }

  // Gradients that are being accumulated move with their bucket. They are held on their own in
  // between, so that the memory of the old buckets can be that of the new ones.
  std::vector<size_t> moving;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    Gradient& gradient = gradients_[i];
    if (gradient.part.defined()) {
      if (gradient.is_in_place()) {
        moving.push_back(i);
      }
      copier_.leave_part_to_holders(gradient);
    }
    gradient.part.reset();
  }
  buckets_.clear();
  std::vector<size_t> sizes;
  std::vector<at::Tensor> like;
  for (const std::vector<size_t>& members : plan) {
    const size_t elements = flat_elements(members, gradients_);
    const at::Tensor& one = gradients_[members.front()].parameter;
    sizes.push_back(progress_.phases().begins_with_half()
                        ? padded_for_parts(elements, one.element_size(), communicator_->world())
                        : elements);
    like.push_back(one);
  }
  order_ = schedule_->order(plan.size());
  if (!is_permutation_of(order_, plan.size())) {
    throw Unsupported("schedule '" + schedule_->name() + "': order(" + std::to_string(plan.size()) +
                      ") must name every bucket from 0 on exactly once");
  }
  std::vector<at::Tensor> flats =
      whole_buckets_ > 0 ? lend_flats(sizes, like, order_, whole_buckets_, *communicator_)
                         : allocate_flats(sizes, like, schedule_->may_join(), *communicator_);
  for (size_t b = 0; b < plan.size(); ++b) {
    buckets_.push_back(make_bucket(b, std::move(plan[b]), gradients_, std::move(flats[b])));
    Bucket& bucket = buckets_.back();
    bucket.layout = Fnv().add(settings_.tag).add(bucket.layout).value();
    if (whole_buckets_ > 0) {
      bucket.kept =
          at::zeros({bucket.flat.numel() / communicator_->world()}, bucket.flat.options());
    }
    copier_.prepare(bucket);
  }
  for (const size_t i : moving) {
    gradients_[i].collect();
    copier_.settle(gradients_[i]);
  }
  buckets_changed();
}

void Reducer::buckets_changed() {
  record_.buckets.assign(buckets_.size(), {});
  progress_.buckets_changed(buckets_.size());
  find_order_of_need();
  cut_buckets();
  if (hook_) {
    hook_->buckets_changed(buckets_.size());
  }
}

void Reducer::set_modules(std::vector<std::vector<size_t>> modules) {
  modules_ = std::move(modules);
  find_order_of_need();
}

void Reducer::find_order_of_need() {
  order_of_need_.clear();
  needed_by_none_.clear();
  std::vector<bool> is_listed(buckets_.size(), modules_.empty());
  std::vector<bool> is_awaited(gradients_.size());
  for (const std::vector<size_t>& module : modules_) {
    std::for_each(module.begin(), module.end(), [&](size_t i) { is_awaited[i] = true; });
  }
  // Ranks launch in this order, and the first forwards of some may have taken another way.
  for (auto i = order_of_rank_0_.rbegin(); i != order_of_rank_0_.rend(); ++i) {
    if (const size_t b = bucket_of(*i); b != kNoBucket && !is_listed[b]) {
      is_listed[b] = true;
      order_of_need_.push_back(b);
    }
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!is_awaited[i] && bucket_of(i) != kNoBucket) {
      needed_by_none_.push_back(bucket_of(i));
    }
  }
}

void Reducer::rebuild(const std::vector<size_t>& order, std::vector<uint64_t> caps) {
  if (!is_permutation_of(order, gradients_.size())) {
    throw Mismatch("rank " + std::to_string(rank()) + " has " + std::to_string(gradients_.size()) +
                   " gradients, rank 0 sent an order of " + std::to_string(order.size()) +
                   "; wrap the same model on all ranks");
  }
  wait_for_gradients();
  order_of_rank_0_ = order;
  if (!caps.empty()) {
    settings_.caps = schedule_->caps(std::move(caps));
  }
  make_buckets(order, true);
  rebuilt_ = true;
}

void Reducer::use_schedule(std::shared_ptr<LaunchSchedule> schedule) {
  wait_for_gradients();
  schedule_ = std::move(schedule);
  listens_ = schedule_->listens();
  order_ = schedule_->order(buckets_.size());
  cut_buckets();
}

void Reducer::use_hook(std::unique_ptr<BucketHook> hook) {
  wait_for_gradients();
  refuse_slices_with(hook.get());
  hook_ = std::move(hook);
  if (hook_) {
    hook_->buckets_changed(buckets_.size());
  }
  copier_.travel_as(std::nullopt);  // a hook gets the gradients as they are
}

void Reducer::reduce_as(at::ScalarType type) {
  use_hook(nullptr);
  copier_.travel_as(type);
}

// ---- forward ---------------------------------------------------------------------------------

void Reducer::begin_forward() {
  if (progress_.phases().updates()) {
    wait_for_what_no_module_needs();
  } else if (!listens(LaunchSchedule::forward_begin)) {
    wait_for_gradients();
  }
  check_complete();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const Gradient& gradient = gradients_[i];
    if (!gradient.kind.type_equal(gradient.parameter.options()) ||
        (hooks_ && hooks_->is_lost(i, gradient.parameter))) {
      raise_changed(rank(), gradient);
    }
  }
  for (const std::weak_ptr<Reducer>& other : shared_with_) {
    if (const auto alive = other.lock()) {
      alive->stand_back();
    }
  }
  record_.forward_begin_ns = now_ns();
  sums_.add_compute(record_);  // of a forward that no backward has followed
  record_.compute_begins(record_.forward_begin_ns);
}

// The cause of an incomplete iteration, rather than the effect.
void Reducer::check_complete() {
  if (!iteration_.open || iteration_.arrived == 0) {
    return;
  }
  try {
    communicator_->check_usable();
  } catch (const Error&) {
    if (!failure_) {
      failure_ = std::current_exception();
    }
  }
  if (failure_) {
    std::rethrow_exception(failure_);
  }
  raise_incomplete();
}

// The next forward has come, and gradients are missing.
void Reducer::raise_incomplete() const {
  std::string names;
  size_t missing = 0;
  bool some_are_frozen = false;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].iteration == iteration_.number) {
      continue;
    }
    some_are_frozen |= !gradients_[i].parameter.requires_grad();
    if (++missing <= kMissingInMessage) {
      names += (missing > 1 ? ", " : "") + gradients_[i].name + " (" + std::to_string(i) + ")";
    }
  }
  const std::string here = "rank " + std::to_string(rank()) + ": ";
  if (missing == 0) {
    throw Error(here +
                "the backward before this forward ended with an error after all gradients "
                "were there; this rank cannot go on from here");
  }
  const std::string advice =
      some_are_frozen
          ? "Some no longer require grad: after freezing or unfreezing parameters, call refresh() "
            "of the wrapped model on all ranks"
      : static_graph_
          ? "With static_graph=True every step must use the parameters that the first one used"
          : "If the model does not always use all parameters, pass find_unused_parameters=True";
  throw Error(here + std::to_string(missing) + " of " + std::to_string(gradients_.size()) +
              " parameters did not receive grad in the backward of " + step_in_words() +
              ", so their buckets were not averaged: " + names +
              (missing > kMissingInMessage ? ", ..." : "") + ". " + advice +
              "; if backward was interrupted, this rank cannot go on from here");
}

void Reducer::end_forward(bool synchronised, const std::vector<at::Tensor>& outputs) {
  record_.forward_end_ns = record_.computes_until_ns = now_ns();
  if (iteration_.open && synchronised_ && !synchronised) {
    only_of_outputs_ = output_hooks_.has_any();  // backward of the one before may still come
    words_.end_forward(0, progress_.phases().updates());
    return;
  }
  if (iteration_.open) {
    progress_.cancel();  // no backward has followed the last forward
    iteration_.open = false;
  }
  finish_phases();
  synchronised_ = synchronised;
  words_.end_forward(synchronised ? iteration_.step() : 0, progress_.phases().updates());
  if (!synchronised) {
    return;
  }
  output_hooks_.watch(outputs, births_);
  reached_.clear();
  if (settings_.find_unused && hooks_) {
    reached_.assign(gradients_.size(), 0);
    RECORD_FUNCTION("search_unused_parameters", std::vector<c10::IValue>());
    hooks_->find_reached(outputs, reached_);
    graph_changed_ |= !reached_before_.empty() && reached_before_ != reached_;
    reached_before_ = reached_;
  }
  open(false);
}

void Reducer::open(bool again) {
  if (births_) {
    births_->step_begins(iteration_.arrived == gradients_.size());
  }
  ++iteration_.number;
  iteration_.open = true;
  iteration_.again = again;
  only_of_outputs_ = false;
  graph_task_ = -1;
  iteration_.arrived = 0;
  record_.arrival.clear();
  record_.arrival_ns.clear();
  undefined_.clear();
  sparse_.clear();
  computed_.begin_iteration();
  iteration_.stepped = false;
  next_launch_ = 0;
  oldest_launched_ = 0;
  for (SliceState& slice : slices_) {
    slice.begin();
  }
  progress_.begin();
  copier_.set_may_move(!shares_parameters());
  for (Bucket& bucket : buckets_) {
    bucket.state = Bucket::filling;
    bucket.skipped = false;
    bucket.first_joined = static_cast<size_t>(&bucket - buckets_.data());
    bucket.joined_count = 1;
    bucket.filled = false;
    bucket.has_own = false;
    bucket.stream.reset();
    bucket.has_one_stream = true;
    bucket.missing = bucket.gradients.size();
  }
  for (StepRecord::OfBucket& bucket : record_.buckets) {
    bucket.begin();
  }
  norms_.begin(iteration_.completed, slot_of_norms(), again, progress_.phases().begins_with_half());
  outermost_is_known_ = false;
  has_ended_ = false;
  if (static_graph_) {
    static_graph_->begin_iteration();
    if (!static_graph_->is_recording()) {
      reached_.resize(gradients_.size());
      for (size_t i = 0; i < gradients_.size(); ++i) {
        reached_[i] = static_graph_->is_used(i) ? 1 : 0;
      }
    }
  }
}

// ---- the end of the step ---------------------------------------------------------------------

// The bucket's phase is over, or with Next::none all that were left are dropped. Nothing else moves
// a bucket on, so the step is over when this has been called for its last bucket, or when backward
// ends after that.
void Reducer::advance(size_t b, Next next) {
  if (next == Next::none) {
    progress_.drop(b);
  } else {
    progress_.advance(b);
  }
  end_step_if_over();
}

void Reducer::end_step_if_over() {
  if (progress_.are_all_over() && !iteration_.open) {
    finish_iteration();
  }
}

void Reducer::finish_iteration() {
  make_undefined();
  give_back();
  if (norms_.is_on()) {
    try {
      const StepRecord::Wait waiting(record_);
      norms_.finish();
    } catch (...) {
      raise_about(GradientNorms::kInWords);
    }
  }
  record_.over_ns = now_ns();
  samples_.add(iteration_.completed, record_);
  sums_.add_communication(record_);
  ++iteration_.completed;
  hear_words(iteration_.completed);
}

// Of the step with this number, unless that has happened.
void Reducer::hear_words(uint64_t step) {
  uint32_t found = 0;
  try {
    const StepRecord::Wait waiting(record_);
    found = words_.finish(slot_of_words(), settings_.tag, step);
  } catch (...) {
    raise_about("the words of all ranks about their steps");
  }
  if (found != 0) {
    callbacks_.differ(found, words_.all());
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

// In a catch block: throws the error as one of dpcore's, with what it is about in front.
void Reducer::raise_about(const std::string& what, const std::string& after) {
  const std::string where = what + " of " + settings_.model + ", " + step_in_words() + ": ";
  try {
    throw;
  } catch (const Error& problem) {
    const bool differs = problem.kind() == ErrorKind::mismatch;
    try {
      throw_as(problem.kind(), where + problem.what() + (differs ? settings_.advice : after));
    } catch (const Error&) {
      if (!failure_) {
        failure_ = std::current_exception();
      }
      throw;
    }
  }
}

// ---- in flight -------------------------------------------------------------------------------

// From here on the program may read `parameter.grad`: to clip it, to log it, to step. What is
// still in flight is waited for now, unless the schedule waits when the optimizer steps and a
// read of a gradient before that can be made to wait as well.
void Reducer::await_or_defer() {
  if (progress_.are_all_over()) {
    return;
  }
  const bool updates = progress_.phases().updates();
  const bool can_wait = updates || listens(LaunchSchedule::optimizer_step);
  if (!can_wait && listens(LaunchSchedule::forward_begin)) {
    const auto first = std::find_if(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) {
      return bucket.state != Bucket::complete;
    });
    throw Error("schedule '" + schedule_->name() + "' leaves " +
                describe(first - buckets_.begin(), *first, gradients_) +
                " in flight at the end of backward and waits for it in forward_begin, after the "
                "optimizer has used its gradients. Wait in backward_end, or define "
                "optimizer_step and wait there");
  }
  if (updates && settings_.grad_is_part) {
    make_undefined();
  }
  // A gradient that is replaced, made or handled by a hook at the end can't be deferred.
  const bool is_memory_of_buckets =
      settings_.grad_is_part && undefined_.empty() && sparse_.empty() && !hook_;
  if (can_wait && is_memory_of_buckets && defer_ && defer_(true)) {
    defers_ = true;
  } else {
    wait_for_all();
  }
}

// Gradients that were deferred are the program's from here on.
void Reducer::give_back() {
  if (defers_) {
    defers_ = false;
    defer_(false);
  }
}

void Reducer::optimizer_steps() {
  if (listens(LaunchSchedule::optimizer_step) && is_in_flight()) {
    schedule_->on_optimizer_step(*this);
  }
  wait_for_gradients();
}

void Reducer::wait_for_gradients() {
  if (!is_in_flight()) {
    return;
  }
  if (iteration_.stepped) {
    finish_phases();
    return;
  }
  wait_for_all();
  if (progress_.phases().updates() && !progress_.phases().updates_parts()) {
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
  synchronised_ = synchronised_ && expects;
}

bool Reducer::is_usable() const {
  try {
    communicator_->check_usable();
  } catch (const Error&) {
    return false;
  }
  return failure_ == nullptr;
}

}  // namespace dpcore
