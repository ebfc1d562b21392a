// The reducer's communicator over the native core: buckets in the arena, all-reduces in place.
//
// Memory: buckets are blocks of this rank's arena, kept by the tensors over them. Threads: see
// bucket_communicator.h; operations are driven by the progress thread or by whoever waits.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

// What every communicator of ours is asked for, in place: the bucket's mean or sum, or half of
// that.
Request request_of(const at::Tensor& bucket, const BucketCall& call, int rank, int world);

class NativeBucketCommunicator final : public BucketCommunicator {
 public:
  // `ordered`: only algorithms whose result does not depend on how gradients are put together,
  // whatever the communicator's own algorithm is.
  NativeBucketCommunicator(std::shared_ptr<Communicator> communicator, bool ordered,
                           Engine::Interrupt interrupt);

  int rank() const override { return communicator_->rank(); }
  int world() const override { return communicator_->world(); }
  void check_usable() override { communicator_->check_usable(); }
  bool can_go_in_halves() const override { return true; }
  at::Tensor allocate(size_t elements, at::ScalarType type, at::Device device) override;
  void reserve(size_t slots) override {
    works_.resize(slots);
    over_ns_.resize(slots);
  }
  void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) override;
  void wait(size_t slot) override;
  int64_t over_ns(size_t slot) const override { return over_ns_[slot]; }
  bool is_done(size_t slot) override;
  void abandon(size_t slot, const at::Tensor& bucket) override;
  TraceRecorder* trace() override { return &communicator_->endpoint().trace(); }

 private:
  std::shared_ptr<Communicator> communicator_;
  bool ordered_;
  Engine::Interrupt interrupt_;
  std::vector<Work> works_;
  std::vector<int64_t> over_ns_;
};

}  // namespace dpcore
