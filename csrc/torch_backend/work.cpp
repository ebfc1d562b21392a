// See work.h for the threads. Two things are done without the lock: marking a future, since that
// runs the callbacks of users, and releasing tensors, since that may take the GIL, whose holder may
// be waiting for our lock.
#include "torch_backend/work.h"

#include <ATen/core/jit_type.h>

#include "torch_backend/flight_log.h"

namespace dpcore {

TorchWork::TorchWork(std::shared_ptr<BackendState> state, const What& what,
                     const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
                     Staging staging)
    : c10d::Work(state->communicator->rank(), what.type, what.title, inputs),
      state_(std::move(state)),
      what_(what),
      outputs_(std::move(outputs)),
      staging_(std::move(staging)) {}

void TorchWork::follow(std::vector<dpcore::Work> operations) {
  operations_ = std::move(operations);
  in_flight_.store(operations_.size());
  if (operations_.empty()) {
    settle();
    return;
  }
  const auto self = c10::intrusive_ptr<TorchWork>::reclaim_copy(this);
  for (const dpcore::Work& operation : operations_) {
    operation->when_complete([self]() mutable {
      if (self->in_flight_.fetch_sub(1) == 1) {
        arrived(std::move(self));
      }
    });
  }
}

void TorchWork::arrived(c10::intrusive_ptr<TorchWork> self) {
  bool leave_to_others = false;
  {
    const std::lock_guard<std::mutex> lock(self->settling_);
    self->has_arrived_.store(true, std::memory_order_release);
    leave_to_others = self->future_ != nullptr || self->staging_.has_copies();
  }
  if (!leave_to_others) {
    self->complete(nullptr);
    if (self.use_count() > 1) {
      return;  // a waiter, or the last owner of the work, releases the tensors
    }
  }
  CallbackThreads& callbacks = self->state_->callbacks;
  callbacks.run([self = std::move(self)] { self->settle(); });
}

std::exception_ptr TorchWork::failure() const {
  for (const dpcore::Work& operation : operations_) {
    if (operation->status.load(std::memory_order_acquire) == Operation::failed) {
      return operation->group().failure().exception();
    }
  }
  return nullptr;
}

void TorchWork::complete(std::exception_ptr problem) {
  const std::lock_guard<std::mutex> lock(settling_);
  if (settled_) {
    return;
  }
  problem_ = problem ? problem : failure();
  if (!problem_) {
    try {
      staging_.copy_back();
    } catch (...) {  // this may be a thread of ours, without a caller to catch it
      problem_ = std::current_exception();
    }
  }
  FlightLog::of_process().complete(what_.flight, problem_ != nullptr);
  settled_ = true;
  has_arrived_.store(true, std::memory_order_release);
  finish(problem_);
}

void TorchWork::settle(std::exception_ptr problem) {
  complete(std::move(problem));
  {
    Staging let_go(state_->communicator);
    const std::lock_guard<std::mutex> lock(settling_);
    std::swap(let_go, staging_);
  }
  mark_future();
}

void TorchWork::mark_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(settling_);
    future = std::exchange(future_to_mark_, nullptr);
  }
  if (!future) {
    return;
  }
  if (problem_) {
    future->setError(problem_);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

bool TorchWork::isCompleted() {
  if (!has_arrived_.load(std::memory_order_acquire)) {
    return false;
  }
  settle();
  return true;
}

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  const double seconds = timeout == kNoTimeout ? 0.0 : static_cast<double>(timeout.count()) / 1e3;
  try {
    for (const dpcore::Work& operation : operations_) {
      state_->communicator->wait(*operation, seconds, state_->interrupt);
    }
  } catch (...) {
    settle(std::current_exception());
    throw;
  }
  settle();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(settling_);
    if (problem_) {
      std::rethrow_exception(problem_);
    }
    future = future_;
  }
  if (future) {
    future->wait();  // another thread may be about to mark it
  }
  return true;
}

void TorchWork::abort() {
  state_->communicator->abort("its program aborted " + std::string(what_.title));
}

int TorchWork::sourceRank() const {
  TORCH_CHECK(operations_.size() == 1, "only a receive from any rank has a source rank");
  const auto* message = dynamic_cast<const MessageOperation*>(operations_.front().get());
  TORCH_CHECK(message != nullptr, "only a receive from any rank has a source rank");
  return message->peer();
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  bool mark_now = false;
  state_->callbacks.be_ready();
  {
    const std::lock_guard<std::mutex> lock(settling_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future_to_mark_ = future_;
      mark_now = has_arrived_.load(std::memory_order_acquire);
    }
  }
  if (mark_now) {
    settle();
  }
  return future_;
}

}  // namespace dpcore
