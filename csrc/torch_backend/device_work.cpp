// See device_work.h for when tensors are released.
#include "torch_backend/device_work.h"

#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>

#include "comm/base/error.h"
#include "torch_backend/flight_log.h"
#include "torch_backend/python_lock.h"

namespace dpcore {

DeviceWork::DeviceWork(std::shared_ptr<BackendState> state, std::shared_ptr<DeviceGroup> group,
                       const What& what, const std::vector<at::Tensor>& inputs,
                       std::vector<at::Tensor> outputs, Staging staging)
    : c10d::Work(state->communicator->rank(), what.type, what.title, inputs),
      state_(std::move(state)),
      group_(std::move(group)),
      what_(what),
      outputs_(std::move(outputs)),
      staging_(std::move(staging)) {}

DeviceWork::~DeviceWork() {
  if (!last_ || last_->is_complete() || staging_.kept().empty()) {
    return;
  }
  // std::function wants what can be copied. Nothing of the communicator is kept: the thread that
  // watches it must not be the last one to hold it.
  auto kept = std::make_shared<Staging>(std::move(staging_));
  last_->when_complete([state = state_, kept = std::move(kept)]() mutable {
    CallbackThreads& callbacks = state->callbacks;
    callbacks.run([state = std::move(state), kept = std::move(kept)] {});
  });
}

void DeviceWork::add(const std::vector<at::Tensor>& outputs, Staging staging) {
  outputs_.insert(outputs_.end(), outputs.begin(), outputs.end());
  staging_.take(std::move(staging));
}

void DeviceWork::started(DeviceGroup::Work last) {
  last_ = std::move(last);
  came_in_ = group_->current_stream();
  last_->when_complete([work = last_.get(), flight = what_.flight] {
    const bool failed = work->state.load(std::memory_order_acquire) == StreamWork::failed;
    FlightLog::of_process().complete(flight, failed);
  });
  if (recordFunctionEndCallback_) {  // profilers see the call; the device's own see what it does
    std::exchange(recordFunctionEndCallback_, nullptr)();
  }
  if (!staging_.has_copies()) {
    return;
  }
  const DeviceGroup::TorchStream aside = group_->stream_of_pool();
  group_->order(last_, aside);
  const c10::OptionalStreamGuard guard(aside);
  staging_.copy_back();
  if (aside) {
    keep_until_passed(staging_.kept(), *aside);
    copied_.emplace(aside->device_type());
    copied_->record(*aside);
  }
}

void DeviceWork::refused() { FlightLog::of_process().complete(what_.flight, true); }

void DeviceWork::check_started() const {
  if (!last_) {
    throw Error(std::string(what_.title) +
                " is part of a batch that was not ended yet: wait for what the batch returns");
  }
}

void DeviceWork::order(const DeviceGroup::TorchStream& stream) const {
  check_started();
  group_->order(last_, stream);  // raises what went wrong, also where the copies are behind it
  if (copied_ && stream) {
    copied_->block(*stream);
  }
}

void DeviceWork::let_go() {
  Staging kept(group_->device());  // they go at the end, without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(kept, staging_);
}

bool DeviceWork::isCompleted() {
  if (!last_) {
    return false;
  }
  const bool is_done =
      last_->is_complete() || (!last_->captured && last_->device->has_happened(last_->event));
  if (!is_done || (copied_ && !copied_->query())) {
    return false;
  }
  let_go();
  return true;
}

bool DeviceWork::isSuccess() const { return last_ && exception() == nullptr; }

std::exception_ptr DeviceWork::exception() const {
  return last_ && last_->state.load(std::memory_order_acquire) == StreamWork::failed
             ? group_->communicator().group().failure().exception()
             : nullptr;
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  check_started();
  if (timeout != kNoTimeout || holds_host_) {
    const double seconds = static_cast<double>(timeout.count()) / 1e3;
    group_->communicator().wait(last_, seconds, state_->interrupt);
  }
  const DeviceGroup::TorchStream current = group_->current_stream();
  order(current);
  if (current == came_in_ || last_->is_complete()) {
    let_go();
  }
  return true;
}

void DeviceWork::synchronize() { order(group_->current_stream()); }

void DeviceWork::abort() {
  group_->communicator().abort("its program aborted " + std::string(what_.title));
}

void DeviceWork::mark(c10::ivalue::Future& future) const {
  const WithoutPythonLock no_lock;  // on the device of the tests it takes as long as the operation
  try {
    const DeviceGroup::TorchStream aside = group_->stream_of_pool();
    order(aside);
    const c10::OptionalStreamGuard guard(aside);
    future.markCompleted(c10::IValue(outputs_));
  } catch (...) {
    future.setError(std::current_exception());
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  check_started();
  c10::intrusive_ptr<c10::ivalue::Future> made;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (future_) {
      return future_;
    }
    std::vector<at::Device> devices;
    if (!group_->device().is_cpu()) {
      devices.push_back(group_->device());
    }
    made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                    std::move(devices));
    future_ = made;
  }
  mark(*made);
  return made;
}

}  // namespace dpcore
