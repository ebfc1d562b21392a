// The torch.distributed backend "dpcore": torch's calls as requests of the core.
//
// Every group of torch has its own communicator (dpcore/comm/launch/torch_backend.py makes it
// through the group's store), and others for tensors on GPUs (device_side.h). torch has one backend
// of a name for all devices, so the device of its tensors decides where a call goes. On the host a
// synchronous call runs on the caller's thread from start to end; an asynchronous one is submitted
// and returns a TorchWork. On a device a call is work in a stream (device_work.h). The core
// compares the ranks' arguments, so different shapes, types, operators or calls are a Mismatch.
//
// Files: backend.cpp construction and memory; backend_call.cpp the path of a call;
// backend_batch.cpp coalesced calls; backend_whole.cpp collectives on one shape; backend_parts.cpp
// those with a part per rank; backend_exchange.cpp all_to_all; backend_messages.cpp send and
// receive; backend_sparse.cpp all-reduce of sparse tensors; backend_monitored.cpp the monitored
// barrier.
//
// Threads: as torch's groups, any thread may call, and all ranks must order calls alike.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "torch_backend/device_side.h"
#include "torch_backend/device_work.h"
#include "torch_backend/flight_log.h"
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
               c10::intrusive_ptr<Options> options, Engine::Interrupt interrupt,
               DeviceSide::Settings device);
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
  // torch tells the device in advance: its communicator is made now, by all ranks.
  void eagerConnectSingleDevice(at::Device device) override;

  // Messages of a batch travel at the same time. Where torch has no devices they do so anyway.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_.load(); }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  // In the arena; on a device torch's own memory, known to the library.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  const DeviceSide& devices() const { return devices_; }

 private:
  // One call on its way to becoming a work.
  struct Call {
    c10d::OpType type;
    const char* title;  // "dpcore:all_reduce"
    at::Device device;  // of all tensors
    bool asynchronous;
    std::chrono::milliseconds timeout;
    Staging staging;
    Tensors inputs{};
    Tensors outputs{};
    std::vector<Request> requests{};
    // Whether inputs and outputs are lists with a tensor per rank, for the flight log; and whether
    // they are cut in parts of different sizes.
    bool lists_inputs = false;
    bool lists_outputs = false;
    bool uneven = false;

    // One more request. `elements` counts for each part, where there are several.
    Request& ask(Collective collective, DType dtype, size_t elements = 0) {
      Request& request = requests.emplace_back();
      request.collective = collective;
      request.dtype = dtype;
      request.count = elements;
      return request;
    }
  };
  template <class CallOptions>
  Call begin(c10d::OpType type, const char* title, at::Device device,
             const CallOptions& options) const {
    return {type, title, device, options.asyncOp, options.timeout, staging_for(device)};
  }
  Staging staging_for(at::Device device) const;
  WorkPtr perform(Call&& call);
  WorkPtr perform_on_host(Call&& call);
  WorkPtr perform_on_device(Call&& call, bool holds_host);
  std::shared_ptr<DeviceGroup> group_on(at::Device device);
  // Gives the call its number and an entry in the flight log.
  TorchWork::What announce(const Call& call, const std::string& name, bool is_message);
  c10::intrusive_ptr<TorchWork> make_work(Call& call, const std::string& name, bool is_message);
  c10::intrusive_ptr<DeviceWork> make_device_work(Call& call, const std::string& name,
                                                  bool is_message);
  double seconds(std::chrono::milliseconds timeout) const;
  // To its end, or to its place in the stream.
  void run_now(Request request, at::Device device);

  // What torch wants to be one call: the works so far, and the messages that wait for the others.
  struct Batch {
    std::vector<WorkPtr> works;
    std::vector<StreamMessage> messages;
    c10::intrusive_ptr<DeviceWork> messages_work;
    std::shared_ptr<DeviceGroup> group;
    double timeout_s = 0;
  };
  // Null where this thread has none open.
  Batch* batch();

  // Requests that several calls share. `own`, `output`: of whose type and size they are.
  static Request& ask_to_move(Call& call, Collective collective, const at::Tensor& own);
  static Request& ask_to_reduce(Call& call, Collective collective, const at::Tensor& output,
                                const c10d::ReduceOp& op);
  void add_all_reduce(Call& call, const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  void add_all_gather(Call& call, const Tensors& outputs, const at::Tensor& input) const;
  void add_all_gather(Call& call, const at::Tensor& output, const at::Tensor& input) const;
  void add_reduce_scatter(Call& call, const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op) const;
  WorkPtr message(bool sends, Tensors& tensors, int peer, int tag);
  WorkPtr message_on_device(Call&& call, const std::string& name, bool sends, int peer, int tag);

  std::shared_ptr<BackendState> state_;
  StorePtr store_;
  c10::intrusive_ptr<Options> options_;
  FlightLog::Ranks ranks_;  // of this group, numbered as in the job
  DeviceSide devices_;
  std::mutex batches_mutex_;
  std::map<std::thread::id, std::unique_ptr<Batch>> batches_;  // by opening thread
  std::atomic<uint64_t> collectives_{0};
  std::atomic<uint64_t> messages_{0};
  std::atomic<uint64_t> monitored_{0};
};

}  // namespace dpcore
