// Gradients that were taken when a compiled backward had computed them, until it delivers them.
//
// Keeps a reference to each value, which the graph holds anyway until it returns. A delivery
// belongs to the run of autograd that took the gradient: one that a run with an error has left
// behind is forgotten. Belongs to the thread that runs backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dpcore {

class ComputedGradients {
 public:
  enum class Delivery : uint8_t { other, same, differs };

  explicit ComputedGradients(size_t gradients) : of_(gradients), declined_(gradients) {}

  void begin_iteration() {
    count_ = 0;
    for (Taken& taken : of_) {
      taken = {};
    }
    std::fill(declined_.begin(), declined_.end(), nullptr);
  }

  void take(size_t i, const at::Tensor& value) {
    ++count_;
    of_[i] = {value, value._version(), torch::autograd::get_current_graph_task_id(), false};
  }

  void decline(size_t i, const char* why) { declined_[i] = why; }

  // What AccumulateGrad is about to add. `other`: nothing was taken that this could be.
  Delivery deliver(size_t i, const at::Tensor& delivered) {
    const Taken taken = std::exchange(of_[i], {});
    if (!taken.value.defined() || taken.run != torch::autograd::get_current_graph_task_id()) {
      return Delivery::other;
    }
    of_[i].is_dropped = true;
    return delivered.defined() && is_same(taken, delivered) ? Delivery::same : Delivery::differs;
  }

  // Whether the hook that runs after AccumulateGrad belongs to a gradient that was dropped.
  bool was_dropped(size_t i) { return std::exchange(of_[i].is_dropped, false); }

  // In this iteration.
  size_t count() const { return count_; }
  // By gradient, why it was not taken in this iteration when it was announced, or null.
  const std::vector<const char*>& declined() const { return declined_; }

 private:
  struct Taken {
    at::Tensor value;
    int64_t version = 0;
    int run = -1;
    bool is_dropped = false;
  };

  static bool is_same(const Taken& taken, const at::Tensor& delivered) {
    const at::Tensor& value = taken.value;
    if (value._version() != taken.version) {
      return false;  // changed in place
    }
    const bool is_its_memory = delivered.layout() == at::kStrided &&
                               delivered.const_data_ptr() == value.const_data_ptr() &&
                               delivered.strides() == value.strides() &&
                               delivered.sizes() == value.sizes() &&
                               delivered.scalar_type() == value.scalar_type();
    return is_its_memory || at::equal(delivered, value);
  }

  std::vector<Taken> of_;
  std::vector<const char*> declined_;
  size_t count_ = 0;
};

}  // namespace dpcore
