// See bucket_hook.h. The narrow copies are allocated once per bucket, where an all-reduce is
// cheapest.
#include "reducer/bucket_hook.h"

#include <utility>

namespace dpcore {
namespace {

class NarrowHook final : public BucketHook {
 public:
  NarrowHook(at::ScalarType type, std::shared_ptr<Collectives> collectives)
      : type_(type), collectives_(std::move(collectives)) {}

  void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) override {
    if (!is_wider(bucket)) {
      collectives_->start(slot, bucket, call);
      return;
    }
    at::Tensor& narrow = narrow_[slot];
    if (!narrow.defined()) {
      narrow = collectives_->allocate(static_cast<size_t>(bucket.numel()), type_, bucket.device());
    }
    narrow.copy_(bucket);
    collectives_->start(slot, narrow, call);
  }
  void wait(size_t slot, const at::Tensor& bucket) override {
    collectives_->wait(slot);
    if (is_wider(bucket)) {
      bucket.copy_(narrow_[slot]);
    }
  }
  void abandon(size_t slot) override {
    if (narrow_[slot].defined()) {
      collectives_->abandon(slot, narrow_[slot]);
    }
  }
  void buckets_changed(size_t buckets) override { narrow_.assign(buckets, at::Tensor()); }

 private:
  bool is_wider(const at::Tensor& bucket) const {
    return bucket.is_floating_point() &&
           static_cast<size_t>(bucket.element_size()) > c10::elementSize(type_);
  }

  at::ScalarType type_;
  std::shared_ptr<Collectives> collectives_;
  std::vector<at::Tensor> narrow_;  // by bucket; undefined until the first time
};

}  // namespace

std::unique_ptr<BucketHook> reduce_as(at::ScalarType type,
                                      std::shared_ptr<Collectives> collectives) {
  return std::make_unique<NarrowHook>(type, std::move(collectives));
}

}  // namespace dpcore
