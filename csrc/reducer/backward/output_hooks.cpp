// See output_hooks.h.
#include "reducer/backward/output_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace dpcore {
namespace {

class NoteRun final : public torch::autograd::FunctionPreHook {
 public:
  explicit NoteRun(std::shared_ptr<std::atomic<int>> last_run) : last_run_(std::move(last_run)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    last_run_->store(torch::autograd::get_current_graph_task_id());
    return grads;
  }
  // Compiled autograd is refused where gradients arrive (gradient_hooks.h).
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  std::shared_ptr<std::atomic<int>> last_run_;
};

}  // namespace

void OutputHooks::watch(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<NoteRun>(last_run_));
    }
  }
}

bool OutputHooks::has_passed() const {
  const int run = torch::autograd::get_current_graph_task_id();
  return run >= 0 && last_run_->load() == run;
}

}  // namespace dpcore
