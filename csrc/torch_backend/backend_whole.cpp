// Collectives on one shape: broadcast, all_reduce, reduce, barrier.
#include <algorithm>
#include <iterator>
#include <utility>

#include "comm/base/error.h"
#include "tensors/tensor_memory.h"
#include "torch_backend/backend.h"

namespace dpcore {
namespace {

double factor_of(const c10d::ReduceOp& op) {
  const auto* factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(factor != nullptr, "a premultiplied sum without its factor");
  return factor->tensor_factor.defined() ? factor->tensor_factor.item().toDouble()
                                         : factor->double_factor;
}

// torch's operator as ours; the factor of a premultiplied sum goes into the request.
void set_operator(Request& request, const c10d::ReduceOp& op) {
  using Torch = c10d::ReduceOp;
  static constexpr std::pair<Torch::RedOpType, ReduceOp> kOps[] = {
      {Torch::SUM, ReduceOp::sum},
      {Torch::AVG, ReduceOp::mean},
      {Torch::PRODUCT, ReduceOp::prod},
      {Torch::MIN, ReduceOp::min},
      {Torch::MAX, ReduceOp::max},
      {Torch::BAND, ReduceOp::band},
      {Torch::BOR, ReduceOp::bor},
      {Torch::BXOR, ReduceOp::bxor},
      {Torch::PREMUL_SUM, ReduceOp::premul_sum}};
  const auto* found = std::find_if(std::begin(kOps), std::end(kOps),
                                   [&](const auto& one) { return one.first == op.op_; });
  if (found == std::end(kOps)) {
    throw Unsupported("this reduction operator is not supported");
  }
  request.op = found->second;
  if (request.op == ReduceOp::premul_sum) {
    request.prescale = factor_of(op);
  }
}

}  // namespace

TorchBackend::WorkPtr TorchBackend::broadcast(Tensors& tensors,
                                              const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_one(tensors, "broadcast");
  Call call = begin(c10d::OpType::BROADCAST, "dpcore:broadcast", tensor.device(), options);
  Request& request = ask_to_move(call, Collective::broadcast, tensor);
  request.root = static_cast<int>(options.rootRank);
  const bool gives = request.root == getRank();
  request.output = gives ? call.staging.update(tensor) : call.staging.write(tensor);
  request.input = request.output;
  call.inputs = call.outputs = tensors;
  return perform(std::move(call));
}

Request& TorchBackend::ask_to_move(Call& call, Collective collective, const at::Tensor& own) {
  const DType dtype = moved_dtype_of(own.scalar_type());
  return call.ask(collective, dtype, static_cast<size_t>(own.numel()));
}

Request& TorchBackend::ask_to_reduce(Call& call, Collective collective, const at::Tensor& output,
                                     const c10d::ReduceOp& op) {
  const DType dtype = dtype_of(output.scalar_type(), name_of(collective).data());
  Request& request = call.ask(collective, dtype, static_cast<size_t>(output.numel()));
  set_operator(request, op);
  return request;
}

void TorchBackend::add_all_reduce(Call& call, const at::Tensor& tensor,
                                  const c10d::ReduceOp& op) const {
  Request& request = ask_to_reduce(call, Collective::all_reduce, tensor, op);
  request.output = call.staging.update(tensor);
  request.input = request.output;
}

TorchBackend::WorkPtr TorchBackend::allreduce(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().layout() == at::kSparse) {
    return allreduce_sparse(tensors, options);
  }
  const at::Tensor& tensor = only_one(tensors, "all_reduce");
  Call call = begin(c10d::OpType::ALLREDUCE, "dpcore:all_reduce", tensor.device(), options);
  add_all_reduce(call, tensor, options.reduceOp);
  call.inputs = call.outputs = tensors;
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Call call =
      begin(c10d::OpType::ALLREDUCE_COALESCED, "dpcore:all_reduce", device_of(tensors), options);
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce_coalesced");
    add_all_reduce(call, tensor, options.reduceOp);
  }
  call.inputs = call.outputs = tensors;
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only_one(tensors, "reduce");
  Call call = begin(c10d::OpType::REDUCE, "dpcore:reduce", tensor.device(), options);
  Request& request = ask_to_reduce(call, Collective::reduce, tensor, options.reduceOp);
  request.root = static_cast<int>(options.rootRank);
  request.output = call.staging.update(tensor);
  request.input = request.output;
  call.inputs = call.outputs = tensors;
  return perform(std::move(call));
}

// On the host, unless the caller names a device, or torch was told this rank's: then what is in its
// current stream has to be done as well.
TorchBackend::WorkPtr TorchBackend::barrier(const c10d::BarrierOptions& options) {
  std::optional<at::Device> device = getBoundDeviceId();
  if (!options.device_ids.empty()) {
    device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device_ids.front()));
  }
  if (!device || !devices_.takes(*device)) {
    device = at::Device(at::kCPU);
  }
  Call call = begin(c10d::OpType::BARRIER, "dpcore:barrier", *device, options);
  call.requests.emplace_back();
  Batch* const open = batch();
  if (!devices_.takes(*device) || open != nullptr) {
    return perform(std::move(call));
  }
  return perform_on_device(std::move(call), true);
}

}  // namespace dpcore
