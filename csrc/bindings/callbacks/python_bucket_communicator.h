// The reducer's communicator as calls into Python: for torch process groups, MPI, CuPy, or whatever
// has `all_reduce(tensor, op, async_op=True)`. Each call takes the GIL; the native ones do not.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "bindings/py_work.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class PythonBucketCommunicator final : public BucketCommunicator {
 public:
  // `group`: rank, world_size, all_reduce(tensor, op=..., async_op=True) -> object with wait().
  // Where it has a `_recorder`, a communicator of the core, events go to that one's recorder.
  explicit PythonBucketCommunicator(pybind11::object group);
  ~PythonBucketCommunicator() override;

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  at::Tensor allocate(size_t elements, at::ScalarType type, at::Device device) override;
  void reserve(size_t slots) override;
  void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) override;
  void wait(size_t slot) override;
  bool is_done(size_t slot) override;
  void abandon(size_t slot, const at::Tensor& bucket) override;
  TraceRecorder* trace() override {
    return recorder_ == nullptr ? nullptr : &recorder_->core->endpoint().trace();
  }

 private:
  pybind11::object group_;
  std::shared_ptr<PyCommunicator> recorder_;
  int rank_;
  int world_;
  std::vector<pybind11::object> works_;
};

}  // namespace dpcore
