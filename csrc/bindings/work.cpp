// dpcore._C.Work.
#include "bindings/py_work.h"
#include "comm/error.h"

namespace py = pybind11;

namespace dpcore {

PyWork::PyWork(std::shared_ptr<PyCommunicator> communicator, Work operation,
               std::vector<py::object> buffers)
    : communicator(std::move(communicator)),
      operation(std::move(operation)),
      buffers(std::move(buffers)) {}

PyWork::~PyWork() {
  if (operation && !operation->is_complete()) {
    communicator->orphans.push_back({std::move(operation), std::move(buffers)});
  }
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

namespace {

void wait(PyWork& work, double timeout) {
  const py::gil_scoped_release no_gil;
  work.communicator->core->wait(*work.operation, timeout, check_signals);
}

// None, or (name of the class in dpcore.errors, message).
py::object failure_of(PyWork& work) {
  if (work.operation->status.load(std::memory_order_acquire) != Operation::failed) {
    return py::none();
  }
  const Failure failure = work.operation->group().failure();
  return py::make_tuple(name_of(failure.kind), failure.message);
}

}  // namespace

void register_work(py::module_& m) {
  py::class_<PyWork, std::shared_ptr<PyWork>>(m, "Work")
      .def("wait", wait, py::arg("timeout") = 0.0)
      .def("is_completed", [](PyWork& work) { return work.operation->is_complete(); })
      .def("failure", failure_of)
      .def_property_readonly(
          "source",
          [](PyWork& work) -> py::object {
            const auto* message = dynamic_cast<const MessageOperation*>(work.operation.get());
            return message == nullptr || message->peer() == MessageOperation::kAnyRank
                       ? py::none()
                       : py::cast(message->peer());
          })
      .def("describe", [](PyWork& work) { return work.operation->describe(); })
      .def(
          "when_complete",
          [](PyWork& work, py::function call) {
            // Called by the thread that completes the operation, which does not hold the GIL.
            auto held = std::make_shared<py::function>(std::move(call));
            work.operation->when_complete([held]() mutable {
              const py::gil_scoped_acquire gil;
              try {
                (*held)();
              } catch (py::error_already_set& problem) {
                problem.discard_as_unraisable("dpcore.Work.when_complete");
              }
              held.reset();
            });
          },
          py::arg("call"));
}

}  // namespace dpcore
