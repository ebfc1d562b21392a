// The reducer's communicator over a process group of torch, called as C++: of NCCL in a program
// that has called init_process_group("nccl"), of whatever kind where a program passes it as comm=.
//
// A mean is NCCL's own; of other groups it is a sum that is divided when it is there.
//
// Memory: buckets are torch's, see group_buckets.h; the group's work keeps what is in flight.
// Threads: see reducer/bucket/bucket_communicator.h; the GIL is not needed. wait() waits as long as
// the group's own timeout says. On a GPU torch's stream waits, and not the thread.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

#include "bindings/buckets/group_buckets.h"

namespace dpcore {

class TorchBucketCommunicator final : public GroupBuckets {
 public:
  TorchBucketCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, at::Device device);
  ~TorchBucketCommunicator() override;

  int rank() const override { return group_->getRank(); }
  int world() const override { return group_->getSize(); }
  void reserve(size_t slots) override { operations_.resize(slots); }
  void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) override;
  void wait(size_t slot) override;
  bool is_done(size_t slot) override { return operations_[slot].work->isCompleted(); }
  void abandon(size_t slot, const at::Tensor&) override { operations_[slot] = {}; }

 private:
  struct Operation {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor to_divide;  // by the number of ranks, when the sum is there
  };

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool averages_;  // on a GPU the group has a mean
  std::vector<Operation> operations_;
};

}  // namespace dpcore
