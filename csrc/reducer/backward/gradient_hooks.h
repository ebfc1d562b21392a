// Hooks on the nodes of autograd's graph that add a gradient to `parameter.grad`.
//
// A node (AccumulateGrad) is only weakly held by its parameter: whoever wants its hook to stay
// keeps the node. The hook runs after the gradient was added, on the thread that runs backward,
// without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace dpcore {

class GradientListener {
 public:
  // `incoming` is what autograd has added; `parameter.grad` may be over the same memory.
  virtual void gradient_ready(size_t gradient, const at::Tensor& incoming) = 0;
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
  // Sets reached[i] for every parameter i whose gradient a backward from `outputs` will produce.
  // The caller has sized it.
  void find_reached(const std::vector<at::Tensor>& outputs, std::vector<uint8_t>& reached) const;

 private:
  // torch 2.13 counts references to nodes in the node, earlier versions beside it.
  using NodePointer =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Installed {
    NodePointer node;
    uintptr_t key;
  };
  std::vector<Installed> installed_;
  std::unordered_map<const torch::autograd::Node*, size_t> gradient_of_;
};

}  // namespace dpcore
