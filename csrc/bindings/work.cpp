// dpcore._C.Work.
#include "bindings/py_work.h"

#include <utility>

#include "bindings/callbacks/py_callback.h"
#include "comm/base/error.h"

namespace py = pybind11;

namespace dpcore {

PyWork::PyWork(std::shared_ptr<PyCommunicator> communicator, Work operation,
               std::vector<HeldBuffer> buffers)
    : communicator(std::move(communicator)),
      operation(std::move(operation)),
      buffers(std::move(buffers)) {}

PyWork::~PyWork() {
  if (operation && !operation->is_complete()) {
    communicator->orphans.push_back({std::move(operation), std::move(buffers)});
  }
}

void PyWork::let_go_when_complete() {
  if (operation->is_complete()) {
    const std::vector<HeldBuffer> gone = std::exchange(buffers, {});
  }
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

py::tuple told(const Group& group) {
  group.say_heard();
  const Failure failure = group.failure();
  return py::make_tuple(name_of(failure.kind), failure.message);
}

py::object unheard_failure_of(const Group& group) {
  return group.is_unheard() ? py::object(told(group)) : py::none();
}

namespace {

void wait(PyWork& work, double timeout) {
  if (!(timeout >= 0)) {
    throw Unsupported("timeout " + std::to_string(timeout) +
                      ": wait() takes seconds, or 0 for the operation's own deadline");
  }
  struct HoldDeleter {
    PyWork& work;
    ~HoldDeleter() { work.let_go_when_complete(); }
  } const let_go{work};
  const py::gil_scoped_release no_gil;
  work.communicator->core->wait(*work.operation, timeout, check_signals);
}

bool is_completed(PyWork& work) {
  work.let_go_when_complete();
  return work.operation->is_complete();
}

void when_complete(PyWork& work, py::function call) {
  if (work.operation->is_complete()) {
    call();
    return;
  }
  work.operation->when_complete(python_callback(work.communicator->callbacks, std::move(call)));
}

// None when it has not failed.
py::object failure_of(PyWork& work) {
  work.let_go_when_complete();
  const bool failed = work.operation->status.load(std::memory_order_acquire) == Operation::failed;
  return failed ? py::object(told(work.operation->group())) : py::none();
}

}  // namespace

void register_work(py::module_& m) {
  py::class_<PyWork, std::shared_ptr<PyWork>>(m, "Work")
      .def("wait", wait, py::arg("timeout") = 0.0)
      .def("is_completed", is_completed)
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
      .def("when_complete", when_complete, py::arg("call"));
}

}  // namespace dpcore
