// See python_bucket_communicator.h. Python objects are touched, and dropped, with the GIL only.
#include "bindings/callbacks/python_bucket_communicator.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

namespace py = pybind11;

namespace dpcore {

PythonBucketCommunicator::PythonBucketCommunicator(py::object group)
    : group_(std::move(group)),
      rank_(group_.attr("rank").cast<int>()),
      world_(group_.attr("world_size").cast<int>()) {
  if (py::hasattr(group_, "_recorder")) {
    recorder_ = group_.attr("_recorder").cast<std::shared_ptr<PyCommunicator>>();
  }
}

PythonBucketCommunicator::~PythonBucketCommunicator() {
  const py::gil_scoped_acquire gil;
  works_.clear();
  recorder_.reset();
  group_ = {};
}

at::Tensor PythonBucketCommunicator::allocate(size_t elements, at::ScalarType type,
                                              at::Device device) {
  return at::zeros({static_cast<int64_t>(elements)},
                   at::TensorOptions().dtype(type).device(device));
}

void PythonBucketCommunicator::reserve(size_t slots) {
  const py::gil_scoped_acquire gil;
  works_.resize(slots);
}

void PythonBucketCommunicator::start(size_t slot, const at::Tensor& bucket,
                                     const BucketCall& call) {
  const py::gil_scoped_acquire gil;
  const auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(bucket));
  works_[slot] = group_.attr("all_reduce")(tensor, py::arg("op") = std::string(name_of(call.op)),
                                           py::arg("async_op") = true);
}

void PythonBucketCommunicator::wait(size_t slot) {
  const py::gil_scoped_acquire gil;
  works_[slot].attr("wait")();
  works_[slot] = {};
}

bool PythonBucketCommunicator::is_done(size_t slot) {
  const py::gil_scoped_acquire gil;
  return py::hasattr(works_[slot], "is_completed") &&
         works_[slot].attr("is_completed")().cast<bool>();
}

void PythonBucketCommunicator::abandon(size_t slot, const at::Tensor&) {
  const py::gil_scoped_acquire gil;
  works_[slot] = {};  // the operation of a group holds its tensors itself
}

}  // namespace dpcore
