// See used_map.h.
#include "reducer/backward/used_map.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

namespace dpcore {
namespace {

constexpr int kUrgent = 1 << 30;  // the map is small, and all that follows depends on it

}  // namespace

UsedMap::UsedMap(size_t gradients, std::shared_ptr<BucketCommunicator> communicator,
                 at::Device device)
    : communicator_(std::move(communicator)),
      accumulated_(gradients),
      used_(gradients),
      used_anywhere_(communicator_->allocate(std::max<size_t>(gradients, 1), at::kInt, device)) {}

void UsedMap::agree(const std::vector<uint8_t>& reached, const std::vector<size_t>& undefined,
                    size_t slot, uint64_t layout) {
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
  communicator_->start(
      slot, used_anywhere_,
      {.op = ReduceOp::sum, .priority = kUrgent, .layout = layout, .background = false});
  communicator_->wait(slot);
  here.copy_(used_anywhere_);
}

}  // namespace dpcore
