// See stream_bucket_communicator.h.
#include "bindings/buckets/stream_bucket_communicator.h"

#include <ATen/ops/zeros.h>

#include "comm/base/error.h"
#include "reducer/bucket/bucket_communicator_native.h"
#include "tensors/tensor_memory.h"
#include "torch_backend/device_group.h"
#include "torch_backend/python_lock.h"

namespace dpcore {

StreamBucketCommunicator::StreamBucketCommunicator(std::shared_ptr<StreamCommunicator> communicator,
                                                   std::string device_name, bool ordered,
                                                   bool deterministic)
    : communicator_(std::move(communicator)),
      device_name_(std::move(device_name)),
      copier_(device_name_),
      ordered_(ordered),
      deterministic_(deterministic) {}

StreamBucketCommunicator::~StreamBucketCommunicator() {
  const WithoutPythonLock unlocked;
  works_.clear();
  communicator_.reset();
}

// The other ranks have to come to it, and they may be threads that want the GIL.
std::shared_ptr<std::byte> StreamBucketCommunicator::allocate_shared(size_t bytes) {
  const WithoutPythonLock unlocked;
  return communicator_->allocate_shared(bytes);
}

at::Tensor StreamBucketCommunicator::allocate(size_t elements, at::ScalarType type,
                                              at::Device device) {
  if (device_name_ == "cpu" ? !device.is_cpu() : device.str() != device_name_) {
    throw Unsupported("the communicator works on " + device_name_ + ", the parameters are on " +
                      device.str() + "; move the module with .to('" + device_name_ + "')");
  }
  const size_t bytes = elements * at::elementSize(type);
  if (auto shared = bytes > 0 ? allocate_shared(bytes) : nullptr) {
    at::Tensor bucket =
        tensor_over(std::move(shared), {static_cast<int64_t>(elements)}, type, device);
    return bucket.zero_();
  }
  return registered(*communicator_, at::zeros({static_cast<int64_t>(elements)},
                                              at::TensorOptions().dtype(type).device(device)));
}

// NCCL's own reductions are not ordered.
std::string StreamBucketCommunicator::algorithm_of(Collective collective) const {
  if (!ordered_ || collective == Collective::all_gather) {
    return "";
  }
  const std::string name = collective == Collective::all_reduce ? "two_shot" : "direct";
  return communicator_->backend() == "nccl" ? name + "/moves" : name;
}

// Operations run one after the other, so `call.after` has run before this one.
void StreamBucketCommunicator::start(size_t slot, const at::Tensor& bucket,
                                     const BucketCall& call) {
  Request request = request_of(bucket, call, rank(), world());
  std::string name;
  if (call.algorithm != nullptr) {
    use_algorithm(request, *call.algorithm, world());
    request.ordered = deterministic_;
    name = call.algorithm->name;
  } else {
    name = algorithm_of(call.collective);
  }
  works_[slot] = communicator_->submit(std::move(request), name, current_stream_of(device_name_));
}

void StreamBucketCommunicator::wait(size_t slot) {
  communicator_->order(works_[slot], current_stream_of(device_name_));
  works_[slot].reset();  // back to the pool
}

bool StreamBucketCommunicator::is_done(size_t slot) { return works_[slot]->is_complete(); }

void StreamBucketCommunicator::abandon(size_t slot, const at::Tensor& bucket) {
  if (works_[slot]) {
    communicator_->keep(std::move(works_[slot]), std::make_shared<at::Tensor>(bucket));
  }
  works_[slot].reset();
}

bool StreamBucketCommunicator::add_moment(const TraceEvent& event) {
  communicator_->trace().moment(event, current_stream_of(device_name_));
  return true;
}

uint64_t StreamBucketCommunicator::begin_span(const TraceEvent& event) {
  return communicator_->trace().begin(event, current_stream_of(device_name_));
}

void StreamBucketCommunicator::end_span(uint64_t span) {
  communicator_->trace().end(span, current_stream_of(device_name_));
}

}  // namespace dpcore
