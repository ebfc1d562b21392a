// The reducer's communicator over one for devices. Here, because neither the reducer nor
// csrc/cuda knows the other.
//
// start() is ordered after the stream that backward runs in, so a bucket leaves when its gradients
// are computed, not when they are asked for; wait() makes that stream wait, and not the thread. The
// host is never blocked, the device not longer than the result needs.
//
// Memory: buckets are the communicator's where peers can reach those without a copy, otherwise
// torch's, registered with the library where it wants to know them in advance.
// Threads: see reducer/bucket/bucket_communicator.h; the GIL is not needed.
#pragma once

#include <string>
#include <vector>

#include "bindings/buckets/device_copier.h"
#include "bindings/py_stream.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class StreamBucketCommunicator final : public BucketCommunicator {
 public:
  // `ordered`, `deterministic`: see native_bucket_communicator().
  StreamBucketCommunicator(std::shared_ptr<StreamCommunicator> communicator,
                           std::string device_name, bool ordered, bool deterministic);
  // As the last owner of the communicator it ends it, which may wait for threads that want Python.
  ~StreamBucketCommunicator() override;

  int rank() const override { return communicator_->rank(); }
  int world() const override { return communicator_->world(); }
  void check_usable() override { communicator_->check_usable(); }
  at::Tensor allocate(size_t elements, at::ScalarType type, at::Device device) override;
  bool can_go_in_halves() const override { return true; }
  bool allocates_alone() const override { return false; }
  void reserve(size_t slots) override { works_.resize(slots); }
  void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) override;
  void wait(size_t slot) override;
  bool is_done(size_t slot) override;
  void abandon(size_t slot, const at::Tensor& bucket) override;
  bool copies_together(at::ScalarType gradients, at::ScalarType flat, at::Device) const override {
    return DeviceCopier::can_copy(gradients, flat);
  }
  size_t copy_together(const GradientCopies& copies) override {
    return copier_.copy(communicator_->device(), copies);
  }
  TraceRecorder* trace() override { return &communicator_->host_trace(); }
  bool add_moment(const TraceEvent& event) override;
  uint64_t begin_span(const TraceEvent& event) override;
  void end_span(uint64_t span) override;

 private:
  std::shared_ptr<std::byte> allocate_shared(size_t bytes);
  std::string algorithm_of(Collective collective) const;

  std::shared_ptr<StreamCommunicator> communicator_;
  std::string device_name_;
  DeviceCopier copier_;
  bool ordered_;
  bool deterministic_;
  std::vector<StreamCommunicator::Work> works_;
};

}  // namespace dpcore
