// The reducer's communicator as calls into Python (the native ones do without the GIL), and the
// hooks that may replace its all-reduces.
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/buckets/group_buckets.h"
#include "bindings/callbacks/callbacks.h"
#include "bindings/py_work.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// Tests have groups that copy on the device of the host.
std::shared_ptr<Device> launches_of(const py::object& group, at::Device device) {
  return py::hasattr(group, "_copies_on")
             ? device_named(group.attr("_copies_on").cast<std::string>())
             : launches_on(device);
}

class PythonBucketCommunicator final : public GroupBuckets {
 public:
  PythonBucketCommunicator(py::object group, at::Device device)
      : GroupBuckets(device, launches_of(group, device)),
        group_(std::move(group)),
        rank_(group_.attr("rank").cast<int>()),
        world_(group_.attr("world_size").cast<int>()) {
    if (py::hasattr(group_, "_recorder")) {
      recorder_ = group_.attr("_recorder").cast<std::shared_ptr<PyCommunicator>>();
    }
  }
  ~PythonBucketCommunicator() override {
    const py::gil_scoped_acquire gil;
    works_.clear();
    recorder_.reset();
    group_ = {};
  }

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  void reserve(size_t slots) override {
    const py::gil_scoped_acquire gil;
    works_.resize(slots);
  }
  void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) override {
    check_algorithm(call);
    const py::gil_scoped_acquire gil;
    const auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(bucket));
    works_[slot] = group_.attr("all_reduce")(tensor, py::arg("op") = std::string(name_of(call.op)),
                                             py::arg("async_op") = true);
  }
  void wait(size_t slot) override {
    const py::gil_scoped_acquire gil;
    works_[slot].attr("wait")();
    works_[slot] = {};
  }
  bool is_done(size_t slot) override {
    const py::gil_scoped_acquire gil;
    return py::hasattr(works_[slot], "is_completed") &&
           works_[slot].attr("is_completed")().cast<bool>();
  }
  void abandon(size_t slot, const at::Tensor&) override {
    const py::gil_scoped_acquire gil;
    works_[slot] = {};  // the operation of a group holds its tensors itself
  }
  TraceRecorder* trace() override {
    return recorder_ == nullptr ? nullptr : &recorder_->core->endpoint().trace();
  }

 private:
  py::object group_;
  std::shared_ptr<PyCommunicator> recorder_;
  int rank_;
  int world_;
  std::vector<py::object> works_;
};

class PythonHook final : public BucketHook {
 public:
  explicit PythonHook(py::object runner) : runner_(std::move(runner)) {}
  ~PythonHook() override {
    const py::gil_scoped_acquire gil;
    runner_ = {};
  }

  void start(size_t slot, const at::Tensor&, const BucketCall& what) override {
    refuse_algorithm(what, "a communication hook runs instead of it; leave out one of the two");
    call("start", slot);
  }
  void wait(size_t slot, const at::Tensor&) override { call("wait", slot); }
  void abandon(size_t slot) override { call("abandon", slot); }
  void buckets_changed(size_t buckets) override { call("buckets_changed", buckets); }

 private:
  void call(const char* method, size_t number) {
    const py::gil_scoped_acquire gil;
    runner_.attr(method)(number);
  }

  py::object runner_;
};

}  // namespace

std::shared_ptr<BucketCommunicator> python_bucket_communicator(py::object group,
                                                               at::Device device) {
  return std::make_shared<PythonBucketCommunicator>(std::move(group), device);
}

std::unique_ptr<BucketHook> python_hook(py::object runner) {
  return std::make_unique<PythonHook>(std::move(runner));
}

}  // namespace dpcore
