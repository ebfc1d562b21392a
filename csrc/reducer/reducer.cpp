// Construction, buckets and their rebuilding, and what forward does. Backward is in
// reducer_backward.cpp.
#include "reducer/reducer.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "comm/clock.h"
#include "comm/error.h"

namespace dpcore {
namespace {

constexpr size_t kNamesInMessages = 8;

bool is_permutation_of(const std::vector<size_t>& order, size_t n) {
  std::vector<bool> seen(n);
  for (const size_t i : order) {
    if (i >= n || seen[i]) {
      return false;
    }
    seen[i] = true;
  }
  return order.size() == n;
}

}  // namespace

Reducer::Reducer(std::vector<Gradient> gradients, std::vector<std::vector<size_t>> modules,
                 Settings settings, std::shared_ptr<Collectives> collectives,
                 std::shared_ptr<LaunchSchedule> schedule, Upcalls upcalls)
    : gradients_(std::move(gradients)),
      modules_(std::move(modules)),
      settings_(std::move(settings)),
      collectives_(std::move(collectives)),
      schedule_(std::move(schedule)),
      upcalls_(std::move(upcalls)),
      listens_(schedule_->listens()) {
  settings_.caps = schedule_->caps(std::move(settings_.caps));
  arrival_.reserve(gradients_.size());
  undefined_.reserve(gradients_.size());
  sparse_.reserve(gradients_.size());
  // Backward reaches what was registered last first, more or less: good enough to overlap in the
  // first iteration already.
  std::vector<size_t> order(gradients_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  make_buckets(order);
  const at::Device device = gradients_.front().parameter.device();
  used_.resize(gradients_.size());
  used_anywhere_ = collectives_->allocate(gradients_.size(), at::kByte, device);
  std::vector<at::Tensor> parameters;
  for (const Gradient& gradient : gradients_) {
    parameters.push_back(gradient.parameter);
  }
  GradientListener& listener = *this;  // a base that only we may convert to
  hooks_ = std::make_unique<GradientHooks>(parameters, listener);
}

Reducer::~Reducer() {
  hooks_.reset();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].state == Bucket::launched && !buckets_[b].skipped) {
      collectives_->abandon(b, buckets_[b].flat);
    }
  }
}

void Reducer::make_buckets(const std::vector<size_t>& order) {
  std::map<std::pair<at::ScalarType, std::string>, uint32_t> kinds;
  std::vector<PlannedGradient> planned(gradients_.size());
  std::vector<size_t> dense;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const at::Tensor& parameter = gradients_[i].parameter;
    const auto kind = std::make_pair(parameter.scalar_type(), parameter.device().str());
    planned[i].kind = kinds.emplace(kind, kinds.size()).first->second;
    planned[i].bytes = static_cast<uint64_t>(parameter.numel()) * parameter.element_size();
  }
  std::copy_if(order.begin(), order.end(), std::back_inserter(dense),
               [&](size_t i) { return !gradients_[i].is_sparse; });
  BucketPlan plan = plan_buckets(planned, dense, settings_.caps);
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
    if (gradient.part.defined() && gradient.is_in_place()) {
      gradient.parameter.mutable_grad() = gradient.part.clone();
      moving.push_back(i);
    }
    gradient.part.reset();
  }
  buckets_.clear();
  for (std::vector<size_t>& members : plan) {
    buckets_.push_back(make_bucket(buckets_.size(), std::move(members), gradients_, *collectives_));
  }
  for (const size_t i : moving) {
    gradients_[i].collect(true);
  }
  order_ = schedule_->order(buckets_.size());
  if (!is_permutation_of(order_, buckets_.size())) {
    throw Unsupported("schedule '" + schedule_->name() + "': order(" +
                      std::to_string(buckets_.size()) +
                      ") must name every bucket from 0 on exactly once");
  }
  requested_.assign(buckets_.size(), std::nullopt);
  collectives_->reserve(buckets_.size() + 1);  // and the map of used gradients
}

void Reducer::rebuild(const std::vector<size_t>& order) {
  if (!is_permutation_of(order, gradients_.size())) {
    throw Mismatch("rank " + std::to_string(collectives_->rank()) + " has " +
                   std::to_string(gradients_.size()) + " gradients, rank 0 sent an order of " +
                   std::to_string(order.size()) + "; wrap the same model on all ranks");
  }
  if (unfinished_ > 0 && !open_) {
    wait_for_all();
  }
  make_buckets(order);
  rebuilt_ = true;
}

void Reducer::begin_forward() {
  if (unfinished_ > 0 && !open_ && !listens(LaunchSchedule::forward_begin)) {
    wait_for_all();
  }
  if (open_ && arrived_ > 0) {
    collectives_->check_usable();  // the cause of an incomplete iteration, rather than the effect
    raise_incomplete();
  }
}

void Reducer::end_forward(bool synchronised, const std::vector<at::Tensor>& outputs) {
  if (open_) {
    unfinished_ = 0;  // no backward has followed the last forward
    open_ = false;
  }
  if (unfinished_ > 0) {
    wait_for_all();
  }
  synchronised_ = synchronised;
  if (!synchronised) {
    return;
  }
  reached_.clear();
  if (settings_.find_unused) {
    reached_.assign(gradients_.size(), 0);
    hooks_->find_reached(outputs, reached_);
  }
  open(false);
}

void Reducer::forward_of_module_begins(size_t module) {
  if (listens(LaunchSchedule::forward_begin) && unfinished_ > 0 && !open_) {
    schedule_->on_forward_begin(*this, module);
  }
}

void Reducer::optimizer_steps() {
  if (listens(LaunchSchedule::optimizer_step) && unfinished_ > 0 && !open_) {
    schedule_->on_optimizer_step(*this);
  }
}

void Reducer::open(bool again) {
  ++iteration_;
  open_ = true;
  again_ = again;
  graph_task_ = -1;
  arrived_ = 0;
  arrival_.clear();
  undefined_.clear();
  sparse_.clear();
  next_launch_ = 0;
  unfinished_ = buckets_.size();
  for (Bucket& bucket : buckets_) {
    bucket.state = Bucket::filling;
    bucket.skipped = false;
    bucket.missing = bucket.gradients.size();
  }
  std::fill(requested_.begin(), requested_.end(), std::nullopt);
}

void Reducer::raise_incomplete() const {
  std::string names;
  size_t missing = 0;
  for (const Gradient& gradient : gradients_) {
    if (gradient.iteration != iteration_ && ++missing <= kNamesInMessages) {
      names += (missing > 1 ? ", " : "") + gradient.name;
    }
  }
  const std::string rank = "rank " + std::to_string(collectives_->rank()) + ": ";
  if (missing == 0) {
    throw Error(rank +
                "the backward before this forward ended with an error after all gradients "
                "were there; this rank cannot go on from here");
  }
  throw Error(rank + std::to_string(missing) + " of " + std::to_string(gradients_.size()) +
              " parameters got no gradient in the backward before this forward, so their buckets "
              "were not averaged: " +
              names + (missing > kNamesInMessages ? ", ..." : "") +
              ". If the model does not always use all parameters, pass "
              "find_unused_parameters=True; if backward was interrupted, this rank cannot go on "
              "from here");
}

}  // namespace dpcore
