// Calls between startCoalescing() and endCoalescing(), which act as one: torch's
// batch_isend_irecv, where a rank's send and receive must not wait for each other.
//
// Collectives start at once, asynchronously, since they only need to keep their order. Messages on
// a device wait for the end of the batch, then travel at the same time; those on the host always
// do. A batch belongs to the thread that opened it and does not affect calls of other threads.
#include <ATen/core/ivalue.h>

#include <algorithm>

#include "comm/base/error.h"
#include "torch_backend/backend.h"

namespace dpcore {
namespace {

// Several works as one.
class BatchWork final : public c10d::Work {
 public:
  using WorkPtr = TorchBackend::WorkPtr;
  BatchWork(int rank, std::vector<WorkPtr> works)
      : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const WorkPtr& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    for (const WorkPtr& work : works_) {
      if (auto problem = work->exception()) {
        return problem;
      }
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const WorkPtr& work : works_) {
      work->wait(timeout);
    }
    return true;
  }
  void synchronize() override {
    for (const WorkPtr& work : works_) {
      work->synchronize();
    }
  }
  void abort() override { works_.front()->abort(); }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> tensors;
    for (const WorkPtr& work : works_) {
      const std::vector<at::Tensor> own = work->result();
      tensors.insert(tensors.end(), own.begin(), own.end());
    }
    return tensors;
  }
  // Complete when all are; its value are their futures.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const WorkPtr& work : works_) {
      futures.push_back(work->getFuture());
    }
    return c10::collectAll(futures);
  }

 private:
  std::vector<WorkPtr> works_;  // at least two
};

}  // namespace

TorchBackend::Batch* TorchBackend::batch() {
  const std::lock_guard<std::mutex> lock(batches_mutex_);
  const auto found = batches_.find(std::this_thread::get_id());
  return found == batches_.end() ? nullptr : found->second.get();
}

void TorchBackend::startCoalescing() {
  if (batch() != nullptr) {
    throw Unsupported("a batch of operations was begun inside another one: end that first");
  }
  const std::lock_guard<std::mutex> lock(batches_mutex_);
  batches_[std::this_thread::get_id()] = std::make_unique<Batch>();
}

TorchBackend::WorkPtr TorchBackend::endCoalescing() {
  std::unique_ptr<Batch> open;  // let go of without the lock, as it holds tensors
  {
    const std::lock_guard<std::mutex> lock(batches_mutex_);
    const auto found = batches_.find(std::this_thread::get_id());
    if (found == batches_.end()) {
      throw Unsupported("a batch of operations was ended that this thread has not begun");
    }
    open = std::move(found->second);
    batches_.erase(found);
  }
  if (open->messages_work) {
    try {
      open->messages_work->started(open->group->submit(open->messages, open->timeout_s));
    } catch (...) {
      open->messages_work->refused();
      throw;
    }
    open->works.push_back(open->messages_work);
  }
  if (open->works.size() == 1) {
    return open->works.front();
  }
  if (!open->works.empty()) {
    return c10::make_intrusive<BatchWork>(getRank(), std::move(open->works));
  }
  Call nothing = begin(c10d::OpType::COALESCED, "dpcore:batch", at::kCPU, c10d::BarrierOptions());
  auto work = make_work(nothing, "coalesced", false);
  work->settle();
  return work;
}

}  // namespace dpcore
