// Tells whether the backward that runs goes through what a synchronised forward returned, by a hook
// on the nodes of autograd's graph that made it.
//
// Hooks live as long as the graph, so they share nothing but a number with this object, which may
// be gone before. Threads: has_passed() and the hooks by those that run backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <vector>

namespace dpcore {

class OutputHooks {
 public:
  void watch(const std::vector<at::Tensor>& outputs);
  // This run of autograd has come through one of them.
  bool has_passed() const;

 private:
  // The last run that came through one.
  std::shared_ptr<std::atomic<int>> last_run_ = std::make_shared<std::atomic<int>>(-1);
};

}  // namespace dpcore
