// The methods that communicators on hosts and on devices have in common, once for both.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "bindings/py_work.h"

namespace dpcore {

// `Comm` holds the communicator of the core as `core`.
template <class Comm, class... Options>
void define_common_methods(pybind11::class_<Comm, Options...>& type) {
  type.def_property_readonly("rank", [](const Comm& comm) { return comm.core->rank(); })
      .def_property_readonly("world_size", [](const Comm& comm) { return comm.core->world(); })
      .def_property_readonly("closed", [](const Comm& comm) { return comm.core->closed(); })
      .def_property_readonly("failed", [](const Comm& comm) { return comm.core->group().failed(); })
      .def("unheard_failure",
           [](const Comm& comm) { return unheard_failure_of(comm.core->group()); })
      .def("abort",
           [](Comm& comm, const std::string& reason) {
             const pybind11::gil_scoped_release no_gil;
             comm.core->abort(reason);
             comm.core->group().say_heard();  // it is the program that said it
           })
      .def("close", [](Comm& comm) {
        {
          const pybind11::gil_scoped_release no_gil;
          if constexpr (requires { comm.core->close(check_signals); }) {
            comm.core->close(check_signals);
          } else {
            comm.core->close();  // it has been told how to look for signals
          }
          comm.callbacks->stop();
        }
        comm.let_go_of_completed();
      });
}

}  // namespace dpcore
