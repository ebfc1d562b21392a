// Construction, buckets and their rebuilding, and what forward does. Backward is in
// reducer_backward.cpp.
#include "reducer/reducer.h"

#include <ATen/ops/zeros.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "reducer/bucket/joined.h"
#include "reducer/bucket/lent.h"

namespace dpcore {
namespace {

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
                 Settings settings, std::shared_ptr<BucketCommunicator> communicator,
                 std::shared_ptr<LaunchSchedule> schedule, Callbacks callbacks)
    : gradients_(std::move(gradients)),
      modules_(std::move(modules)),
      settings_(std::move(settings)),
      communicator_(std::move(communicator)),
      schedule_(std::move(schedule)),
      callbacks_(std::move(callbacks)),
      listens_(schedule_->listens()),
      legs_(schedule_->journey(), communicator_),
      whole_buckets_(schedule_->whole_buckets()) {
  if (whole_buckets_ > 0 && !legs_.journey().updates_parts()) {
    throw Unsupported("schedule '" + schedule_->name() +
                      "': whole_buckets() is for the journey reduce_scatter, update, all_gather; "
                      "on others each rank needs all averages");
  }
  settings_.caps = schedule_->caps(std::move(settings_.caps));
  arrival_.reserve(gradients_.size());
  arrival_ns_.reserve(gradients_.size());
  undefined_.reserve(gradients_.size());
  sparse_.reserve(gradients_.size());
  // Backward reaches what was registered last first, more or less: good enough to overlap in the
  // first iteration already.
  std::vector<size_t> order(gradients_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  make_buckets(order, false);
  const at::Device device =  // of none when all parameters are somebody else's
      gradients_.empty() ? at::Device(at::kCPU) : gradients_.front().parameter.device();
  used_.resize(gradients_.size());
  accumulated_.resize(gradients_.size());
  used_anywhere_ =
      communicator_->allocate(std::max<size_t>(gradients_.size(), 1), at::kInt, device);
  if (settings_.static_graph) {
    set_static_graph();
  }
  std::vector<at::Tensor> parameters;
  for (Gradient& gradient : gradients_) {
    gradient.kind = gradient.parameter.options();
    parameters.push_back(gradient.parameter);
  }
  GradientListener& listener = *this;  // a base that only we may convert to
  hooks_ = std::make_unique<GradientHooks>(parameters, listener);
}

Reducer::~Reducer() {
  hooks_.reset();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    if (bucket.state == Bucket::launched && !bucket.skipped) {
      if (hook_) {
        hook_->abandon(b);
      } else if (bucket.first_joined == b) {
        communicator_->abandon(b, bucket.joined_count > 1 ? bucket.joined : bucket.travelling());
      }
    } else if (legs_.is_in_flight(b)) {
      legs_.abandon(b, bucket);
    }
  }
  if (norms_) {
    norms_->abandon(*communicator_, buckets_.size() + 1);
  }
}

void Reducer::make_buckets(const std::vector<size_t>& order, bool rebuilding) {
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
  const bool as_torch_begins = !rebuilding && settings_.caps.size() == 1;
  BucketPlan plan = as_torch_begins ? plan_buckets_from_end(planned, dense, settings_.caps)
                                    : plan_buckets(planned, dense, settings_.caps);
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
      leave_part_to_holders(gradient);
    }
    gradient.part.reset();
  }
  buckets_.clear();
  std::vector<size_t> sizes;
  std::vector<at::Tensor> like;
  for (const std::vector<size_t>& members : plan) {
    sizes.push_back(legs_.padded(flat_elements(members, gradients_),
                                 gradients_[members.front()].parameter.element_size()));
    like.push_back(gradients_[members.front()].parameter);
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
    choose_copies(bucket);
  }
  for (const size_t i : moving) {
    gradients_[i].collect();
    settle(gradients_[i]);
  }
  requested_.assign(buckets_.size(), std::nullopt);
  legs_.buckets_changed(buckets_.size());
  find_order_of_need();
  communicator_->reserve(buckets_.size() + 2);  // the map of used gradients, and norms
  if (hook_) {
    hook_->buckets_changed(buckets_.size());
  }
}

void Reducer::use_hook(std::unique_ptr<BucketHook> hook) {
  wait_for_gradients();
  hook_ = std::move(hook);
  if (hook_) {
    hook_->buckets_changed(buckets_.size());
  }
  narrow_type_.reset();  // a hook gets the gradients as they are
  for (Bucket& bucket : buckets_) {
    choose_copies(bucket);
  }
}

void Reducer::set_static_graph() {
  if (completed_ > 0) {
    throw Error("a static graph is recorded in the first iteration, and this model has run " +
                std::to_string(completed_) +
                ": the setting should be called before training loop starts");
  }
  settings_.find_unused = false;  // the record says it
  static_graph_ = std::make_unique<StaticGraph>(gradients_.size());
}

void Reducer::rebuild(const std::vector<size_t>& order, std::vector<uint64_t> caps) {
  if (!is_permutation_of(order, gradients_.size())) {
    throw Mismatch("rank " + std::to_string(communicator_->rank()) + " has " +
                   std::to_string(gradients_.size()) + " gradients, rank 0 sent an order of " +
                   std::to_string(order.size()) + "; wrap the same model on all ranks");
  }
  wait_for_gradients();
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
}

void Reducer::begin_forward() {
  if (legs_.journey().updates()) {
    begin_forward_on_journey();
  } else if (!listens(LaunchSchedule::forward_begin)) {
    wait_for_gradients();
  }
  check_complete();
  for (const Gradient& gradient : gradients_) {
    if (!gradient.kind.type_equal(gradient.parameter.options())) {
      raise_changed(gradient);
    }
  }
  for (const std::weak_ptr<Reducer>& other : shared_with_) {
    if (const auto alive = other.lock()) {
      alive->stand_back();
    }
  }
  times_.forward_begin_ns = now_ns();
  watch_.forward_begins(times_.forward_begin_ns);
}

void Reducer::check_complete() {
  if (open_ && arrived_ > 0) {
    // The cause of an incomplete iteration, rather than the effect.
    try {
      communicator_->check_usable();
    } catch (const Error&) {
      if (!first_failure_) {
        first_failure_ = std::current_exception();
      }
    }
    if (first_failure_) {
      std::rethrow_exception(first_failure_);
    }
    raise_incomplete();
  }
}

void Reducer::end_forward(bool synchronised, const std::vector<at::Tensor>& outputs) {
  times_.forward_end_ns = now_ns();
  watch_.goes_on(times_.forward_end_ns);
  if (open_) {
    unfinished_ = 0;  // no backward has followed the last forward
    open_ = false;
  }
  if (unfinished_ > 0) {
    finish_journeys();
  }
  synchronised_ = synchronised;
  if (!synchronised) {
    return;
  }
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

void Reducer::forward_of_module_begins(size_t module) {
  if (listens(LaunchSchedule::forward_begin) && is_on_journey()) {
    in_forward_ = true;
    const auto afterwards = c10::make_scope_exit([this] { in_forward_ = false; });
    schedule_->on_forward_begin(*this, module);
  }
}

void Reducer::open(bool again) {
  ++iteration_;
  open_ = true;
  again_ = again;
  graph_task_ = -1;
  arrived_ = 0;
  arrival_.clear();
  arrival_ns_.clear();
  undefined_.clear();
  sparse_.clear();
  next_launch_ = 0;
  oldest_launched_ = 0;
  unfinished_ = buckets_.size();
  stepped_ = false;
  legs_.begin();
  for (Bucket& bucket : buckets_) {
    bucket.state = Bucket::filling;
    bucket.skipped = false;
    bucket.next_leg_launched_ns = 0;
    bucket.first_joined = static_cast<size_t>(&bucket - buckets_.data());
    bucket.joined_count = 1;
    bucket.filled = false;
    bucket.has_own = false;
    bucket.stream.reset();
    bucket.has_one_stream = true;
    bucket.missing = bucket.gradients.size();
  }
  std::fill(requested_.begin(), requested_.end(), std::nullopt);
  begin_norms();
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

}  // namespace dpcore
