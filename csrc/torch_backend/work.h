// One call of torch.distributed in flight: one operation of the core, or several for a list of
// tensors that torch calls coalesced.
//
// Completion: the thread that completes the last operation calls arrived(), under the engine's
// progress lock. Then settle() remains, once and on any thread: it copies results back, releases
// the tensors and marks the future. A waiter does it on its own thread; without one, a callback
// thread does if there are copies or a future, or if nothing else holds the work. The completing
// thread itself at most records the end (complete()): it must never wait for the GIL, which the
// release of a tensor may take.
//
// Memory: holds the tensors until it is settled, and is held by its operations until then, so
// dropping it early is safe. Deadlines are those of the operations.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/base/callback_threads.h"
#include "comm/communicator.h"
#include "torch_backend/staging.h"

namespace dpcore {

// What works outlive their backend with.
struct BackendState {
  std::shared_ptr<Communicator> communicator;
  Engine::Interrupt interrupt;
  CallbackThreads callbacks;
};

class TorchWork final : public c10d::Work {
 public:
  struct What {
    c10d::OpType type;
    const char* title;  // "dpcore:all_reduce"; lives for ever
    uint64_t number;    // of the call in its group
    uint64_t flight;    // its entry in the flight log
  };
  TorchWork(std::shared_ptr<BackendState> state, const What& what,
            const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
            Staging staging);

  // Takes over operations that were submitted.
  void follow(std::vector<dpcore::Work> operations);
  // Everything was done, or has failed, on the caller's thread.
  void settle(std::exception_ptr problem = nullptr);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override;
  uint64_t getSequencenumber() const override { return what_.number; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  static void arrived(c10::intrusive_ptr<TorchWork> self);
  void complete(std::exception_ptr problem);
  void mark_future();
  std::exception_ptr failure() const;

  std::shared_ptr<BackendState> state_;
  What what_;
  std::vector<at::Tensor> outputs_;
  Staging staging_;
  std::vector<dpcore::Work> operations_;  // immutable once followed
  std::atomic<size_t> in_flight_{0};
  std::atomic<bool> has_arrived_{false};

  std::mutex settling_;  // guards what follows, and staging_ once there are operations
  bool settled_ = false;
  std::exception_ptr problem_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> future_to_mark_;  // by the thread that takes it
};

}  // namespace dpcore
