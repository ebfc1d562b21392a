// See autograd_hooks.h. The walk over the graph is for find_unused_parameters only.
#include "reducer/backward/autograd_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_set>
#include <utility>

namespace dpcore {
namespace {

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(GradientListener& listener, GradientHooks& hooks, size_t gradient)
      : listener_(listener), hooks_(hooks), gradient_(gradient) {}

  void offer(const at::Tensor& value) { hooks_.offer(gradient_, value); }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    listener_.gradient_ready(gradient_, inputs[0]);
    return outputs;  // a node at the end of the graph has none
  }

  // Compiled autograd asks every hook how it can be traced. This one cannot: it runs in C++ while
  // backward runs, which is its use.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    listener_.refuse_tracing();
  }

 private:
  GradientListener& listener_;
  GradientHooks& hooks_;
  size_t gradient_;
};

// Withholds a gradient that was taken when it had been computed. The node keeps this hook, which
// cannot be removed, as long as it lives.
class DeliveryHook final : public torch::autograd::FunctionPreHook {
 public:
  DeliveryHook(std::shared_ptr<GradientHooks*> hooks, GradientListener& listener, size_t gradient)
      : hooks_(std::move(hooks)), listener_(listener), gradient_(gradient) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (*hooks_ != nullptr && listener_.is_taken(gradient_, grads[0])) {
      return {at::Tensor()};
    }
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  bool is_of(const GradientHooks& hooks) const { return *hooks_ == &hooks; }

 private:
  std::shared_ptr<GradientHooks*> hooks_;
  GradientListener& listener_;
  size_t gradient_;
};

constexpr char kCompiledNode[] = "CompiledFunctionBackward";

// Whether hooks of the program see, or may change, what the node adds to `parameter.grad`.
template <typename Node>
bool has_hooks_of_others(Node& node) {
  const auto is_ours = [](const auto& hook) {
    return dynamic_cast<const DeliveryHook*>(hook.get()) != nullptr;
  };
  return node.post_hooks().size() != 1 || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr ||
         !std::all_of(node.pre_hooks().begin(), node.pre_hooks().end(), is_ours);
}

// The run of autograd that this thread works for; null outside. torch exports only what points to
// members of it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
torch::autograd::GraphTask* running_backward() {
  using torch::autograd::GraphTask;
  auto* member = torch::autograd::get_current_graph_task_exec_info();
  if (member == nullptr) {
    return nullptr;
  }
  auto* begin = reinterpret_cast<char*>(
      const_cast<std::remove_const_t<decltype(GraphTask::exec_info_)>*>(member));
  return reinterpret_cast<GraphTask*>(begin - offsetof(GraphTask, exec_info_));
}
#pragma GCC diagnostic pop

// Whether one edge of this backward has yet to bring the node a gradient, and none has.
bool waits_for_one(torch::autograd::Node& node) {
  auto& run = *running_backward();
  const std::lock_guard lock(run.mutex_);
  const auto edges = run.dependencies_.find(&node);
  return edges != run.dependencies_.end() && edges->second == 1 && !run.not_ready_.contains(&node);
}

// Where a backward begins with one node, it is not in the graph that torch lists.
template <typename Use>
void for_each_node_of_backward(const Use& use) {
  if (const auto* run = running_backward()) {
    std::for_each(run->nodes_in_graph_.begin(), run->nodes_in_graph_.end(), use);
    for (const auto* root : run->graph_roots_) {
      auto* node = const_cast<torch::autograd::Node*>(root);
      if (!run->nodes_in_graph_.contains(node)) {
        use(node);
      }
    }
  }
}

class PassedHook final : public torch::autograd::FunctionPreHook {
 public:
  PassedHook(std::shared_ptr<std::atomic<int>> last_run, std::shared_ptr<BirthPlan> births)
      : last_run_(std::move(last_run)), births_(std::move(births)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    last_run_->store(torch::autograd::get_current_graph_task_id());
    if (births_) {
      births_->backward_begins();
    }
    return grads;
  }
  // Compiled autograd is refused where gradients arrive (ReadyHook).
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  bool is_of(const std::shared_ptr<std::atomic<int>>& last_run) const {
    return last_run_ == last_run;
  }

 private:
  std::shared_ptr<std::atomic<int>> last_run_;
  std::shared_ptr<BirthPlan> births_;
};

}  // namespace

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, GradientListener& listener)
    : listener_(listener), self_(std::make_shared<GradientHooks*>(this)) {
  installed_.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(parameters[i]);
    const uintptr_t key = node->add_post_hook(std::make_unique<ReadyHook>(listener, *this, i));
    gradient_of_.emplace(node.get(), i);
    installed_.push_back({std::move(node), key});
  }
}

GradientHooks::~GradientHooks() {
  *self_ = nullptr;
  for (const Installed& hook : installed_) {
    hook.node->del_post_hook(hook.key);
  }
}

bool GradientHooks::is_lost(size_t gradient, const at::Tensor& parameter) const {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return node.get() != installed_[gradient].node.get();
}

void GradientHooks::find_reached(const std::vector<at::Tensor>& outputs,
                                 std::vector<uint8_t>& reached) const {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> open;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  std::vector<torch::autograd::Edge> kept;  // the node of a leaf may live only as long as its edge
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) {
      kept.push_back(torch::autograd::impl::gradient_edge(output));
      visit(kept.back().function.get());
    }
  }
  while (!open.empty()) {
    const torch::autograd::Node* node = open.back();
    open.pop_back();
    const auto found = gradient_of_.find(node);
    if (found != gradient_of_.end()) {
      reached[found->second] = 1;
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
}

// ---- compiled backwards ----------------------------------------------------------------------

void hear_computed(const at::Tensor& value, int64_t output) {
  const auto running = torch::autograd::get_current_node();
  // With inputs= of a backward, or torch.autograd.grad, not every edge is used.
  if (!running || output < 0 || static_cast<size_t>(output) >= running->num_outputs() ||
      !running->post_hooks().empty() ||
      !torch::autograd::get_current_graph_task_exec_info()->empty()) {
    return;
  }
  const auto& node = running->next_edge(static_cast<size_t>(output)).function;
  if (!node) {
    return;
  }
  for (const auto& hook : node->post_hooks()) {
    if (auto* ready = dynamic_cast<ReadyHook*>(hook.get())) {
      ready->offer(value);
      return;
    }
  }
}

void GradientHooks::offer(size_t gradient, const at::Tensor& value) {
  auto& node = *installed_[gradient].node;
  if (has_hooks_of_others(node)) {
    listener_.decline(gradient, "a hook of the program may see or change them");
    return;
  }
  if (!waits_for_one(node)) {
    listener_.decline(gradient, "more than one part of the graph adds to them");
    return;
  }
  if (!listener_.gradient_computed(gradient, value)) {
    return;
  }
  const bool has_hook = std::any_of(
      node.pre_hooks().begin(), node.pre_hooks().end(),
      [this](const auto& hook) { return static_cast<const DeliveryHook&>(*hook).is_of(*this); });
  if (!has_hook) {
    node.add_pre_hook(std::make_unique<DeliveryHook>(self_, listener_, gradient));
  }
}

size_t GradientHooks::count_compiled() const {
  size_t count = 0;
  for_each_node_of_backward([&](const torch::autograd::Node* node) {
    const auto& edges = node->next_edges();
    const size_t ours = std::count_if(edges.begin(), edges.end(), [this](const auto& edge) {
      return gradient_of_.contains(edge.function.get());
    });
    if (ours > 0 && node->name() == kCompiledNode) {
      count += ours;
    }
  });
  return count;
}

void OutputHooks::watch(const std::vector<at::Tensor>& outputs,
                        const std::shared_ptr<BirthPlan>& births) {
  has_any_ = false;
  for (const at::Tensor& output : outputs) {
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<PassedHook>(last_run_, births));
      has_any_ = true;
    }
  }
}

bool OutputHooks::passes() const {
  const int run = torch::autograd::get_current_graph_task_id();
  if (run < 0 || last_run_->load() == run) {
    return run >= 0;
  }
  if (searched_.exchange(run) != run) {
    for_each_node_of_backward([&](torch::autograd::Node* node) {
      for (const auto& hook : node->pre_hooks()) {
        const auto* passed = dynamic_cast<const PassedHook*>(hook.get());
        if (passed != nullptr && passed->is_of(last_run_)) {
          last_run_->store(run);
        }
      }
    });
  }
  return last_run_->load() == run;
}

}  // namespace dpcore
