// Construction, buckets and their rebuilding, and what forward does. Backward is in
// reducer_backward.cpp.
#include "reducer/reducer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "reducer/bucket/flat_memory.h"
#include "reducer/plan/bucket_plan.h"

namespace dpcore {

Reducer::Reducer(std::vector<Gradient> gradients, std::vector<std::vector<size_t>> modules,
                 Settings settings, std::shared_ptr<BucketCommunicator> communicator,
                 std::shared_ptr<LaunchSchedule> schedule, Callbacks callbacks)
    : gradients_(std::move(gradients)),
      settings_(std::move(settings)),
      communicator_(std::move(communicator)),
      callbacks_(std::move(callbacks)),
      norms_(communicator_, device_of(gradients_), settings_.tag),
      failure_{settings_.model, settings_.advice, nullptr},
      trace_(communicator_, settings_.traced_as, settings_.profiled_as),
      copier_(gradients_, buckets_, communicator_, settings_.grad_is_part),
      launcher_({gradients_, buckets_, communicator_, copier_, iteration_, norms_, watch_, trace_,
                 failure_, settings_.tag, callbacks_.update, [this] { finish_iteration(); }},
                std::move(modules), std::move(schedule)),
      used_(gradients_.size(), communicator_, device_of(gradients_)) {
  settings_.caps = launcher_.schedule().caps(std::move(settings_.caps));
  arrival_.reserve(gradients_.size());
  arrival_ns_.reserve(gradients_.size());
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
  GradientListener& listener = *this;  // a base that only we may convert to
  hooks_ = std::make_unique<GradientHooks>(parameters, listener);
}

Reducer::~Reducer() {
  hooks_.reset();
  launcher_.abandon();
  norms_.abandon();
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
      copier_.leave_part_to_holders(gradient);
    }
    gradient.part.reset();
  }
  buckets_.clear();
  std::vector<size_t> sizes;
  std::vector<at::Tensor> like;
  for (const std::vector<size_t>& members : plan) {
    sizes.push_back(launcher_.legs().padded(flat_elements(members, gradients_),
                                            gradients_[members.front()].parameter.element_size()));
    like.push_back(gradients_[members.front()].parameter);
  }
  const std::vector<size_t>& launches = launcher_.make_order(plan.size());
  std::vector<at::Tensor> flats =
      launcher_.whole_buckets() > 0
          ? lend_flats(sizes, like, launches, launcher_.whole_buckets(), *communicator_)
          : allocate_flats(sizes, like, launcher_.schedule().may_join(), *communicator_);
  for (size_t b = 0; b < plan.size(); ++b) {
    buckets_.push_back(make_bucket(b, std::move(plan[b]), gradients_, std::move(flats[b])));
    Bucket& bucket = buckets_.back();
    bucket.layout = Fnv().add(settings_.tag).add(bucket.layout).value();
    if (launcher_.whole_buckets() > 0) {
      bucket.kept =
          at::zeros({bucket.flat.numel() / communicator_->world()}, bucket.flat.options());
    }
    copier_.prepare(bucket);
  }
  for (const size_t i : moving) {
    gradients_[i].collect();
    copier_.settle(gradients_[i]);
  }
  launcher_.buckets_changed();
}

void Reducer::use_hook(std::unique_ptr<BucketHook> hook) {
  wait_for_gradients();
  launcher_.use_hook(std::move(hook));
  copier_.travel_as(std::nullopt);  // a hook gets the gradients as they are
}

void Reducer::reduce_as(at::ScalarType type) {
  use_hook(nullptr);
  copier_.travel_as(type);
}

void Reducer::set_static_graph() {
  if (iteration_.completed > 0) {
    throw Error("a static graph is recorded in the first iteration, and this model has run " +
                std::to_string(iteration_.completed) +
                ": the setting should be called before training loop starts");
  }
  settings_.find_unused = false;  // the record says it
  static_graph_ = std::make_unique<StaticGraph>(gradients_.size());
}

void Reducer::rebuild(const std::vector<size_t>& order, std::vector<uint64_t> caps) {
  if (!is_permutation_of(order, gradients_.size())) {
    throw Mismatch("rank " + std::to_string(rank()) + " has " + std::to_string(gradients_.size()) +
                   " gradients, rank 0 sent an order of " + std::to_string(order.size()) +
                   "; wrap the same model on all ranks");
  }
  wait_for_gradients();
  if (!caps.empty()) {
    settings_.caps = launcher_.schedule().caps(std::move(caps));
  }
  make_buckets(order, true);
  rebuilt_ = true;
}

void Reducer::use_schedule(std::shared_ptr<LaunchSchedule> schedule) {
  wait_for_gradients();
  launcher_.use_schedule(std::move(schedule));
}

void Reducer::begin_forward() {
  if (launcher_.legs().journey().updates()) {
    launcher_.forward_begins_on_journey();
  } else if (!launcher_.listens(LaunchSchedule::forward_begin)) {
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
  times_.forward_begin_ns = now_ns();
  watch_.forward_begins(times_.forward_begin_ns);
}

void Reducer::check_complete() {
  if (iteration_.open && iteration_.arrived > 0) {
    // The cause of an incomplete iteration, rather than the effect.
    try {
      communicator_->check_usable();
    } catch (const Error&) {
      failure_.note(std::current_exception());
    }
    if (failure_.first) {
      std::rethrow_exception(failure_.first);
    }
    raise_incomplete(rank(), gradients_, iteration_.number, iteration_.step(),
                     static_graph_ != nullptr);
  }
}

void Reducer::end_forward(bool synchronised, const std::vector<at::Tensor>& outputs) {
  times_.forward_end_ns = now_ns();
  watch_.goes_on(times_.forward_end_ns);
  if (iteration_.open && synchronised_ && !synchronised) {
    only_of_outputs_ = true;  // backward of the forward before may still come
    return;
  }
  if (iteration_.open) {
    iteration_.unfinished = 0;  // no backward has followed the last forward
    iteration_.open = false;
  }
  if (iteration_.unfinished > 0) {
    launcher_.finish_journeys();
  }
  synchronised_ = synchronised;
  if (!synchronised) {
    return;
  }
  output_hooks_.watch(outputs);
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
  ++iteration_.number;
  iteration_.open = true;
  iteration_.again = again;
  only_of_outputs_ = false;
  graph_task_ = -1;
  iteration_.arrived = 0;
  arrival_.clear();
  arrival_ns_.clear();
  undefined_.clear();
  sparse_.clear();
  launcher_.begin_iteration();
  copier_.set_may_move(!shares_parameters());
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
  norms_.begin(iteration_.completed, buckets_.size() + 1, again);
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
