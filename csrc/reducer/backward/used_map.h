// How many ranks have each gradient: a map that ranks sum if gradients may be missing.
//
// Memory: a number per gradient, here and in memory for collectives. Belongs to the thread of
// forward and backward. When a rank dies: agree() throws, like the wait for a bucket.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class UsedMap {
 public:
  UsedMap(size_t gradients, std::shared_ptr<BucketCommunicator> communicator, at::Device device)
      : communicator_(std::move(communicator)),
        accumulated_(gradients),
        used_(gradients),
        used_anywhere_(communicator_->allocate(std::max<size_t>(gradients, 1), at::kInt, device)) {}

  // A backward without averaging has left something in `parameter.grad`, or not.
  void set_accumulated(size_t i, bool is_there) { accumulated_[i] = is_there ? 1 : 0; }
  bool has_accumulated(size_t i) const { return accumulated_[i] != 0; }
  // With what all ranks had. This one: `reached` (empty: all), less what came `undefined`, and what
  // it has accumulated.
  void agree(const std::vector<uint8_t>& reached, const std::vector<size_t>& undefined, size_t slot,
             uint64_t layout) {
    std::fill(used_.begin(), used_.end(), 1);
    std::copy(reached.begin(), reached.end(), used_.begin());
    for (const size_t i : undefined) {
      used_[i] = 0;
    }
    for (size_t i = 0; i < used_.size(); ++i) {
      used_[i] |= accumulated_[i];
      accumulated_[i] = 0;
    }
    const at::NoGradGuard no_grad;
    const at::Tensor here =
        at::from_blob(used_.data(), {static_cast<int64_t>(used_.size())}, at::kInt);
    used_anywhere_.copy_(here);
    communicator_->start(slot, used_anywhere_,
                         {.op = ReduceOp::sum,
                          .priority = BucketCall::kUrgent,
                          .layout = layout,
                          .background = false});
    communicator_->wait(slot);
    here.copy_(used_anywhere_);
  }
  // How many ranks had each gradient, when that was agreed on last.
  const std::vector<int32_t>& counts() const { return used_; }

 private:
  std::shared_ptr<BucketCommunicator> communicator_;
  std::vector<uint8_t> accumulated_;  // since the last synchronised backward
  std::vector<int32_t> used_;         // whether this rank, then how many ranks had it
  at::Tensor used_anywhere_;          // the same where collectives reach it
};

}  // namespace dpcore
