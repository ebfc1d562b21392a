// See autograd_hooks.h. The walk over the graph is for find_unused_parameters only.
#include "reducer/backward/autograd_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <unordered_set>
#include <utility>

namespace dpcore {
namespace {

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(GradientListener& listener, size_t gradient)
      : listener_(listener), gradient_(gradient) {}

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
  size_t gradient_;
};

class PassedHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit PassedHook(std::shared_ptr<std::atomic<int>> last_run)
      : last_run_(std::move(last_run)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    last_run_->store(torch::autograd::get_current_graph_task_id());
    return grads;
  }
  // Compiled autograd is refused where gradients arrive (ReadyHook).
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  std::shared_ptr<std::atomic<int>> last_run_;
};

}  // namespace

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters,
                             GradientListener& listener) {
  installed_.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(parameters[i]);
    const uintptr_t key = node->add_post_hook(std::make_unique<ReadyHook>(listener, i));
    gradient_of_.emplace(node.get(), i);
    installed_.push_back({std::move(node), key});
  }
}

GradientHooks::~GradientHooks() {
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

void OutputHooks::watch(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<PassedHook>(last_run_));
    }
  }
}

bool OutputHooks::has_passed() const {
  const int run = torch::autograd::get_current_graph_task_id();
  return run >= 0 && last_run_->load() == run;
}

}  // namespace dpcore
