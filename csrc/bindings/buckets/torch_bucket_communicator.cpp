// See torch_bucket_communicator.h.
#include "bindings/buckets/torch_bucket_communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>

#include "comm/base/error.h"
#include "torch_backend/python_lock.h"

namespace dpcore {
namespace {

c10d::ReduceOp operator_of(ReduceOp op, bool averages) {
  switch (op) {
    case ReduceOp::mean:
      return averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    case ReduceOp::sum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    default:
      throw Unsupported(std::string(name_of(op)) + " of a bucket over a group of torch");
  }
}

}  // namespace

TorchBucketCommunicator::TorchBucketCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                 at::Device device)
    : GroupBuckets(device, launches_on(device)),
      group_(std::move(group)),
      averages_(device.is_cuda() && group_->getBackend(device.type())->getBackendName() == "nccl") {
}

// The end of a work, or of a group, may wait for threads that want Python.
TorchBucketCommunicator::~TorchBucketCommunicator() {
  const WithoutPythonLock unlocked;
  operations_.clear();
  group_.reset();
}

void TorchBucketCommunicator::start(size_t slot, const at::Tensor& bucket, const BucketCall& call) {
  check_algorithm(call);
  const bool averages = averages_ && bucket.is_cuda();
  const bool divides = call.op == ReduceOp::mean && !averages;
  const bool is_narrow = bucket.scalar_type() == at::kHalf;
  if (divides && is_narrow) {  // the sum may be too large for the type
    const at::NoGradGuard no_grad;
    bucket.div_(world());
  }
  c10d::AllreduceOptions options;
  options.reduceOp = operator_of(call.op, averages);
  std::vector<at::Tensor> tensors{bucket.is_complex() ? at::view_as_real(bucket) : bucket};
  operations_[slot] = {group_->allreduce(tensors, options),
                       divides && !is_narrow ? bucket : at::Tensor()};
}

void TorchBucketCommunicator::wait(size_t slot) {
  Operation& operation = operations_[slot];
  operation.work->wait();  // one that fails stays, to fail again
  if (operation.to_divide.defined()) {
    const at::NoGradGuard no_grad;
    operation.to_divide.div_(world());
  }
  operation = {};
}

}  // namespace dpcore
