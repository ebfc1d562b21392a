// See device_group.h.
#include "torch_backend/device_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch_backend/python_lock.h"

namespace dpcore {
namespace {

Device::Stream handle_of(const DeviceGroup::TorchStream& stream) {
  return stream ? stream->native_handle() : nullptr;
}

}  // namespace

DeviceGroup::TorchStream DeviceGroup::current_stream() const {
  if (device_.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

DeviceGroup::TorchStream DeviceGroup::stream_of_pool() const {
  if (device_.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
}

DeviceGroup::Work DeviceGroup::submit(Request request) const {
  return communicator_->submit(std::move(request), {}, handle_of(current_stream()));
}

DeviceGroup::Work DeviceGroup::submit(const std::vector<StreamMessage>& messages,
                                      double timeout_s) const {
  return communicator_->submit(messages, timeout_s, handle_of(current_stream()));
}

void DeviceGroup::order(const Work& work, const TorchStream& stream) const {
  communicator_->order(work, handle_of(stream));
}

at::Tensor DeviceGroup::allocate(int64_t elements, const at::TensorOptions& options) const {
  return registered(*communicator_, at::empty({elements}, options));
}

at::Tensor registered(StreamCommunicator& communicator, const at::Tensor& memory) {
  auto registration = communicator.register_memory(
      static_cast<std::byte*>(memory.mutable_data_ptr()), memory.nbytes());
  if (!registration) {
    return memory;
  }
  // The registration ends before the memory goes back to torch. It waits for calls of other
  // threads, which may be waiting for Python's lock.
  return at::from_blob(
      memory.mutable_data_ptr(), memory.sizes(),
      [keep = memory, registration](void*) mutable {
        {
          const WithoutPythonLock no_lock;
          registration.reset();
        }
        keep.reset();
      },
      memory.options(), memory.device());
}

void keep_until_passed(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl streams(stream.device_type());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.device() == stream.device()) {
      streams.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
  }
}

}  // namespace dpcore
