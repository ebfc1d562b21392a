// One call of torch.distributed on tensors of a device: work that a stream does, as torch's own
// backend for GPUs gives it out.
//
// wait() makes the caller's current stream wait and returns at once; the host waits only where a
// time limit is given, and for a barrier. The future is complete as soon as the work is in the
// stream: it holds an event for its device, so a caller of its wait() orders its own streams after
// the result, and callbacks run on such streams. Errors of other ranks show in isSuccess(),
// exception() and the next call, since no thread waits for the device.
//
// Results that have to be copied to where they belong (tensors with gaps, lists that do not lie in
// a row) are copied at once, by a stream of torch's pool after the operation.
//
// Memory: the tensors are kept until the device no longer uses them. If wait() is called in the
// stream of the call, later work there is ordered after the result, so the tensors are released at
// once, like those of a synchronous call. Otherwise they are released when the operation is seen to
// be complete, or, if the work was dropped before, by a callback thread then. The thread that
// watches the device never releases them, since that may take the GIL. Threads: any.
#pragma once

#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "torch_backend/device_group.h"
#include "torch_backend/work.h"

namespace dpcore {

class DeviceWork final : public c10d::Work {
 public:
  using What = TorchWork::What;
  DeviceWork(std::shared_ptr<BackendState> state, std::shared_ptr<DeviceGroup> group,
             const What& what, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs, Staging staging);
  ~DeviceWork() override;

  // Further tensors of the same work, before it starts.
  void add(const std::vector<at::Tensor>& outputs, Staging staging);
  // The last operation is in the stream; those before it are complete when it is.
  void started(DeviceGroup::Work last);
  // Nothing of it came into the stream.
  void refused();
  // wait() keeps the host as well: time itself is the result.
  void hold_the_host() { holds_host_ = true; }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return what_.number; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void order(const DeviceGroup::TorchStream& stream) const;
  void check_started() const;
  void let_go();
  void mark(c10::ivalue::Future& future) const;

  std::shared_ptr<BackendState> state_;
  std::shared_ptr<DeviceGroup> group_;
  What what_;
  std::vector<at::Tensor> outputs_;
  bool holds_host_ = false;

  // Set by started(), before any other thread has the work; then constant.
  DeviceGroup::Work last_;
  DeviceGroup::TorchStream came_in_;
  std::optional<c10::Event> copied_;  // behind the copies, where there are some

  std::mutex mutex_;  // guards what follows
  Staging staging_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace dpcore
