// A bucket becomes one in-place all-reduce of the core, or half of one. The progress thread or a
// waiting thread advances operations. Tensors over a bucket's memory keep it alive.
#include "reducer/bucket/bucket_communicator_native.h"

#include <algorithm>
#include <vector>

#include "comm/base/error.h"
#include "tensors/tensor_memory.h"

namespace dpcore {
namespace {

class NativeBucketCommunicator final : public BucketCommunicator {
 public:
  NativeBucketCommunicator(std::shared_ptr<Communicator> communicator, bool ordered,
                           bool deterministic, Engine::Interrupt interrupt)
      : communicator_(std::move(communicator)),
        ordered_(ordered),
        deterministic_(deterministic),
        interrupt_(std::move(interrupt)) {}

  int rank() const override { return communicator_->rank(); }
  int world() const override { return communicator_->world(); }
  void check_usable() override { communicator_->check_usable(); }
  bool can_go_in_halves() const override { return true; }
  bool carries_words() const override { return true; }
  bool lends_places() const override { return true; }
  at::Tensor allocate(size_t elements, at::ScalarType type, at::Device device) override {
    if (!device.is_cpu()) {
      throw Unsupported("the native communicator reduces gradients on the CPU, not on " +
                        device.str() + "; pass process_group= for this module");
    }
    const size_t bytes = elements * c10::elementSize(type);
    auto memory = communicator_->allocate(bytes);
    std::fill_n(memory.get(), bytes, std::byte{0});  // a block may have been used before
    return tensor_over(std::move(memory), {static_cast<int64_t>(elements)}, type);
  }
  void reserve(size_t slots) override {
    works_.resize(slots);
    over_ns_.resize(slots);
    not_finite_.resize(slots);
  }
  void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) override {
    Request request = request_of(bucket, call, rank(), world());
    request.ordered = call.algorithm != nullptr ? deterministic_ : ordered_;
    // "" is the communicator's own algorithm, which may not be an ordered one.
    static const CallAlgorithm kOrdered{"auto"};
    static const CallAlgorithm kOwn{""};
    const CallAlgorithm* usual = ordered_ ? &kOrdered : &kOwn;
    const CallAlgorithm& algorithm = call.algorithm != nullptr ? *call.algorithm : *usual;
    use_algorithm(request, algorithm, world());
    works_[slot] = communicator_->submit(std::move(request), algorithm.name, call.background,
                                         call.after ? works_[*call.after] : nullptr);
  }
  void wait(size_t slot) override {
    communicator_->wait(*works_[slot], 0, interrupt_);
    over_ns_[slot] = works_[slot]->over_ns;
    not_finite_[slot] = works_[slot]->not_finite();
    works_[slot].reset();  // back to the pool
  }
  int64_t over_ns(size_t slot) const override { return over_ns_[slot]; }
  // A single rank adds nothing, and another pass over its gradients would be the dearer part.
  bool finds_not_finite() const override { return world() > 1; }
  NotFinite not_finite(size_t slot) const override { return not_finite_[slot]; }
  bool is_done(size_t slot) override { return works_[slot]->is_complete(); }
  void abandon(size_t slot, const at::Tensor& bucket) override {
    if (works_[slot] && !works_[slot]->is_complete()) {
      works_[slot]->when_complete([keep = bucket]() mutable { keep.reset(); });
    }
    works_[slot].reset();
  }
  TraceRecorder* trace() override { return &communicator_->endpoint().trace(); }

 private:
  std::shared_ptr<Communicator> communicator_;
  bool ordered_;
  bool deterministic_;
  Engine::Interrupt interrupt_;
  std::vector<Work> works_;
  std::vector<int64_t> over_ns_;
  std::vector<NotFinite> not_finite_;
};

}  // namespace

std::shared_ptr<BucketCommunicator> native_bucket_communicator(
    std::shared_ptr<Communicator> communicator, bool ordered, bool deterministic,
    Engine::Interrupt interrupt) {
  return std::make_shared<NativeBucketCommunicator>(std::move(communicator), ordered, deterministic,
                                                    std::move(interrupt));
}

Request request_of(const at::Tensor& bucket, const BucketCall& call, int rank, int world) {
  Request request;
  request.collective = call.collective;
  request.dtype = dtype_of(bucket.scalar_type(), "bucket");
  request.op = call.op;
  request.output = static_cast<std::byte*>(bucket.mutable_data_ptr());
  request.input = request.output;
  request.count = static_cast<size_t>(bucket.numel());
  if (call.collective != Collective::all_reduce) {
    request.count /= static_cast<size_t>(world);
    const size_t before = static_cast<size_t>(rank) * request.count * bucket.element_size();
    if (call.collective == Collective::reduce_scatter) {
      request.output += before;
    } else {
      request.input += before;
    }
  }
  request.finds_not_finite = call.finds_not_finite;
  request.layout = call.layout;
  request.words = call.words;
  request.priority = call.priority;
  return request;
}

}  // namespace dpcore
