// The module dpcore._C: one register function per bound class, each in a file of its own.
//
// Errors of the core become the Python classes of dpcore.errors, which is plain Python: a
// program can catch and document them without the compiled module.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <stdlib.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include <cstdio>

#include "bindings/py_work.h"
#include "comm/base/error.h"

namespace py = pybind11;

namespace dpcore {

void register_schedule(py::module_& m);
void register_reduce(py::module_& m);
void register_cuda_probe(py::module_& m);
void register_communicator(py::module_& m);
void register_work(py::module_& m);
void register_stream_communicator(py::module_& m);
void register_inspect(py::module_& m);
void register_launch_control(py::module_& m);
void register_warm_memory(py::module_& m);
void register_reducer(py::module_& m);
void register_network(py::module_& m);
void register_torch_backend(py::module_& m);
void register_quick_method(py::module_& m);

namespace {

void translate(std::exception_ptr problem) {
  if (problem && !set_python_error(problem)) {
    std::rethrow_exception(problem);
  }
}

// Of torch's groups, whose work this module waits for, as torch itself shows them.
void translate_errors_of_torch(std::exception_ptr problem) {
  if (problem) {
    try {
      std::rethrow_exception(problem);
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(problem);
    }
  }
}

// Python has settled on its exit status before it calls what is registered with atexit, where a
// program may learn that its last operations have failed. Its status is changed only if it was 0.
void end_with_error() {
  on_exit(
      [](int status, void*) {
        if (status == 0) {
          std::fflush(nullptr);
          _exit(1);
        }
      },
      nullptr);
}

}  // namespace

bool set_python_error(const std::exception_ptr& problem) {
  try {
    std::rethrow_exception(problem);
  } catch (const Error& e) {
    const py::object type = py::module_::import("dpcore.errors").attr(name_of(e.kind()));
    PyErr_SetString(type.ptr(), e.what());
  } catch (...) {
    return false;
  }
  return true;
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled core of dpcore. Use the package dpcore instead of this module.";
  // For all modules: torch's functions raise our errors too, from the backend of torch.distributed.
  py::register_exception_translator(translate);
  py::register_local_exception_translator(translate_errors_of_torch);
  register_schedule(m);
  register_reduce(m);
  register_cuda_probe(m);
  register_work(m);
  register_network(m);
  register_communicator(m);
  register_stream_communicator(m);
  register_inspect(m);
  register_launch_control(m);
  register_warm_memory(m);
  register_reducer(m);
  register_torch_backend(m);
  register_quick_method(m);
  m.def("end_with_error", end_with_error, "This program ends with status 1 if it would with 0.");
}

}  // namespace dpcore
