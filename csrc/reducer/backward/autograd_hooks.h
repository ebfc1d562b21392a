// Hooks on autograd's graph, through which the reducer learns of gradients.
//
// `GradientHooks` are on the nodes that add a gradient to `parameter.grad` (AccumulateGrad). A
// parameter holds its node only weakly, so the hooks keep theirs. A hook runs after the gradient
// was added, on the thread that runs backward, without the GIL.
//
// A compiled backward is one node, which returns all gradients when it is done. An operation in its
// graph calls hear_computed() for each of them as soon as it has been computed; the hook of the
// parameter is found by the edge on which the gradient will leave the node. If the listener takes
// the gradient, a second hook on AccumulateGrad withholds it when the node delivers it.
//
// `OutputHooks` tell whether the running backward goes through the outputs of a synchronised
// forward, by hooks on the nodes that made these. The hooks live as long as the graph and may
// outlive the object, so they share only a number with it. Threads: those that run backward call
// passes() and the hooks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "reducer/backward/birth_plan.h"

namespace dpcore {

class GradientListener {
 public:
  // `incoming` is what autograd has added; `parameter.grad` may be over the same memory.
  virtual void gradient_ready(size_t gradient, const at::Tensor& incoming) = 0;
  // A node that is still running will deliver this as the whole gradient of the parameter. Returns
  // whether it has been added to `parameter.grad` already.
  virtual bool gradient_computed(size_t gradient, const at::Tensor& value) = 0;
  // It will not be offered before the node delivers it, and why.
  virtual void decline(size_t gradient, const char* why) = 0;
  // The node delivers a gradient. Returns whether it was taken when it had been computed, so that
  // it must not be added again.
  virtual bool is_taken(size_t gradient, const at::Tensor& delivered) = 0;
  // Compiled autograd wants to trace backward, which no hook here can be part of: throws.
  virtual void refuse_tracing() = 0;

 protected:
  ~GradientListener() = default;
};

class GradientHooks {
 public:
  // The listener must live as long as this object.
  GradientHooks(const std::vector<at::Tensor>& parameters, GradientListener& listener);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Whether autograd has made the parameter another node, as it does where its type changes.
  bool is_lost(size_t gradient, const at::Tensor& parameter) const;
  // Whether ours is the only hook that sees what autograd adds, besides those of its own.
  bool is_alone(size_t gradient) const {
    return installed_[gradient].node->post_hooks().size() == 1;
  }
  // Sets reached[i] for every parameter i whose gradient a backward from `outputs` will produce.
  // The caller has sized it.
  void find_reached(const std::vector<at::Tensor>& outputs, std::vector<uint8_t>& reached) const;
  // How many gradients a compiled backward delivers in this run of autograd, whether or not an
  // operation has announced them.
  size_t count_compiled() const;

  // Offers a gradient to the listener, unless something else would add to it or change it before it
  // is in `parameter.grad`.
  void offer(size_t gradient, const at::Tensor& value);

 private:
  // torch 2.13 counts references to nodes in the node, earlier versions beside it.
  using NodePointer =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Installed {
    NodePointer node;
    uintptr_t key;
  };

  GradientListener& listener_;
  std::vector<Installed> installed_;
  std::unordered_map<const torch::autograd::Node*, size_t> gradient_of_;
  // Hooks that outlive this object share it with them; then it is null.
  std::shared_ptr<GradientHooks*> self_;
};

// Called by the operation in a compiled backward: `value` is what the running node will return as
// its output number `output`.
void hear_computed(const at::Tensor& value, int64_t output);

class OutputHooks {
 public:
  // `births`, or null, hears of the runs that come through them.
  void watch(const std::vector<at::Tensor>& outputs, const std::shared_ptr<BirthPlan>& births);
  // Whether the last ones had any through which a run could go.
  bool has_any() const { return has_any_; }
  // Whether this run of autograd goes through one of them. Gradients may come before it has.
  bool passes() const;

 private:
  // The last run that goes through one, as far as is known.
  std::shared_ptr<std::atomic<int>> last_run_ = std::make_shared<std::atomic<int>>(-1);
  mutable std::atomic<int> searched_ = -1;  // the last run whose graph was searched for one
  bool has_any_ = false;
};

}  // namespace dpcore
