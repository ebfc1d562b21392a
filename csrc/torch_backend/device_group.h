// The communicator of a group for one device, between torch's streams.
//
// What torch calls the current stream is the calling thread's; everything here is ordered against
// it, or against a stream of torch's pool. Only device-generic parts of c10 are used: no CUDA
// header.
//
// On the device of the tests (csrc/cuda/device/device_host.h) tensors are on the CPU and the
// current stream is the caller itself: what would let a stream wait then lets the caller wait.
//
// Memory: shared by the backend and its works. Threads: any.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <vector>

#include "cuda/stream/stream_communicator.h"

namespace dpcore {

class DeviceGroup {
 public:
  using Work = StreamCommunicator::Work;
  // Null on the device of the tests.
  using TorchStream = std::optional<c10::Stream>;

  DeviceGroup(std::shared_ptr<StreamCommunicator> communicator, at::Device device)
      : communicator_(std::move(communicator)), device_(device) {}

  StreamCommunicator& communicator() const { return *communicator_; }
  const at::Device& device() const { return device_; }

  TorchStream current_stream() const;
  TorchStream stream_of_pool() const;

  Work submit(Request request) const;
  Work submit(const std::vector<StreamMessage>& messages, double timeout_s) const;
  // `stream` waits for the result.
  void order(const Work& work, const TorchStream& stream) const;

  // Memory that the library may know in advance, as torch's allocator gives it.
  at::Tensor allocate(int64_t elements, const at::TensorOptions& options) const;

 private:
  std::shared_ptr<StreamCommunicator> communicator_;
  at::Device device_;
};

// The same memory, announced to the communicator for as long as the tensor lives.
at::Tensor registered(StreamCommunicator& communicator, const at::Tensor& memory);

// Keeps the allocator from reusing memory of these tensors before `stream` has passed this point,
// even if they are released now.
void keep_until_passed(const std::vector<at::Tensor>& tensors, const c10::Stream& stream);

}  // namespace dpcore
