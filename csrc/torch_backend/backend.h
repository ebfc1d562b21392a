// The torch.distributed backend "dpcore": torch's calls as requests of the core.
//
// Every group of torch has a communicator of its own (dpcore/torch_backend.py makes it through the
// group's store). A synchronous call runs on the caller's thread from top to bottom; an
// asynchronous one is submitted and returns a TorchWork. The core compares what the ranks ask for,
// so different shapes, types, operators or calls are a Mismatch on every rank.
//
// Files: backend.cpp life, memory and the way of a call; backend_whole.cpp collectives on one
// shape; backend_parts.cpp those with a part per rank; backend_messages.cpp send and receive;
// backend_sparse.cpp all-reduce of sparse tensors; backend_monitored.cpp the monitored barrier.
//
// Threads: as torch's groups, any thread may call, and all ranks must order calls alike.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "torch_backend/staging.h"
#include "torch_backend/work.h"

namespace dpcore {

class TorchBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;

  TorchBackend(std::shared_ptr<Communicator> communicator, StorePtr store,
               c10::intrusive_ptr<Options> options, Engine::Interrupt interrupt);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return "dpcore"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override;

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;

  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  c10::intrusive_ptr<c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  bool supportsSplitting() const override { return true; }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_.load(); }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  // One call on its way to becoming a work.
  struct Call {
    c10d::OpType type;
    const char* title;  // "dpcore:all_reduce"
    bool asynchronous;
    std::chrono::milliseconds timeout;
    Staging staging;
    Tensors inputs;
    Tensors outputs;
    std::vector<Request> requests;
  };
  template <class CallOptions>
  Call begin(c10d::OpType type, const char* title, const CallOptions& options) const {
    return {type, title, options.asyncOp, options.timeout, Staging(state_->communicator), {},
            {},   {}};
  }
  WorkPtr perform(Call&& call);
  c10::intrusive_ptr<TorchWork> make_work(Call& call, std::string name, bool is_message);
  double seconds(std::chrono::milliseconds timeout) const;

  // Requests that several calls share.
  void add_all_reduce(Call& call, const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  void add_all_gather(Call& call, const Tensors& outputs, const at::Tensor& input) const;
  void add_all_gather(Call& call, const at::Tensor& output, const at::Tensor& input) const;
  void add_reduce_scatter(Call& call, const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op) const;
  WorkPtr message(MessageOperation::Direction direction, Tensors& tensors, int peer, int tag);

  std::shared_ptr<BackendState> state_;
  StorePtr store_;
  c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> collectives_{0};
  std::atomic<uint64_t> messages_{0};
  std::atomic<uint64_t> monitored_{0};
};

// torch's operator as ours; the factor of a premultiplied sum goes into the request.
void set_operator(Request& request, const c10d::ReduceOp& op);

}  // namespace dpcore
