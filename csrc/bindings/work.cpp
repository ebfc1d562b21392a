// dpcore._C.Work, and what the program is told of failures.
#include <utility>

#include "bindings/call_arguments.h"
#include "bindings/common_methods.h"
#include "comm/base/error.h"

namespace py = pybind11;

namespace dpcore {

PyCommunicator::~PyCommunicator() {
  if (core.use_count() < 2) {
    return;
  }
  const py::gil_scoped_release no_gil;
  for (const Orphan& orphan : orphans) {
    try {
      core->wait(*orphan.operation, 0, nullptr);
    } catch (const Error&) {  // nothing is left that would hear it
    }
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

py::tuple told(const FirstFailure& failure) {
  failure.acknowledge();
  const Failure first = failure.get();
  return py::make_tuple(name_of(first.record.kind), first.message);
}

py::object told_if_unacknowledged(const FirstFailure& failure) {
  return failure.is_unacknowledged() ? py::object(told(failure)) : py::none();
}

std::function<void()> python_callback(const std::shared_ptr<CallbackThreads>& threads,
                                      py::function call) {
  threads->be_ready();
  // The thread that drops it last has the GIL or takes it. It must not be the one that completes
  // the operation, since the end of a communicator may hang on it: so it gives its reference away.
  std::shared_ptr<py::function> held(new py::function(std::move(call)), [](py::function* function) {
    const py::gil_scoped_acquire gil;
    delete function;
  });
  return [threads, held = std::move(held)]() mutable {
    threads->run([held = std::move(held)] {
      const py::gil_scoped_acquire gil;
      try {
        (*held)();
      } catch (py::error_already_set& problem) {
        problem.discard_as_unraisable("dpcore.Work.when_complete");
      }
    });
  };
}

void check_wait(double timeout) {
  if (!(timeout >= 0)) {
    throw Unsupported("timeout " + std::to_string(timeout) +
                      ": wait() takes seconds, or 0 for the operation's own deadline");
  }
}

namespace {

void wait(PyWork& work, RealArgument<"timeout"> timeout) {
  check_wait(timeout);
  struct LetGo {
    PyWork& work;
    ~LetGo() { work.let_go_when_complete(); }
  } const let_go{work};
  const py::gil_scoped_release no_gil;
  work.communicator->core->wait(*work.operation, timeout, check_signals);
}

bool is_completed(PyWork& work) {
  work.let_go_when_complete();
  return work.operation->is_complete();
}

// None when it has not failed.
py::object failure_of(PyWork& work) {
  work.let_go_when_complete();
  const bool failed = work.operation->status.load(std::memory_order_acquire) == Operation::failed;
  return failed ? py::object(told(work.operation->group().failure())) : py::none();
}

}  // namespace

void register_work(py::module_& m) {
  py::class_<FirstFailure>(m, "FirstFailure")
      .def(py::init())
      .def("set",
           [](FirstFailure& failure, const std::string& error, const std::string& message) {
             return failure.set({make_record(kind_named(error), -1, -1, 0, message), message},
                                [] {});
           })
      .def_property_readonly("is_set", &FirstFailure::is_set)
      .def("check", &FirstFailure::check)
      .def("acknowledge", &FirstFailure::acknowledge)
      .def("told", told)
      .def("told_if_unacknowledged", told_if_unacknowledged);
  py::class_<PyWork, std::shared_ptr<PyWork>> type(m, "Work");
  define_common_work_methods(type);
  type.def("wait", wait, py::arg("timeout") = 0.0)
      .def("is_completed", is_completed)
      .def("failure", failure_of)
      .def_property_readonly("source", [](PyWork& work) -> py::object {
        const auto* message = dynamic_cast<const MessageOperation*>(work.operation.get());
        return message == nullptr || message->peer() == MessageOperation::kAnyRank
                   ? py::none()
                   : py::cast(message->peer());
      });
}

}  // namespace dpcore
