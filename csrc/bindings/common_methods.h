// The methods that communicators on hosts and on devices, and their works, have in common.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <string>

#include "bindings/py_work.h"

namespace dpcore {

template <class Comm, class... Options>
void define_common_methods(pybind11::class_<Comm, Options...>& type) {
  type.def_property_readonly("rank", [](const Comm& comm) { return comm.core->rank(); })
      .def_property_readonly("world_size", [](const Comm& comm) { return comm.core->world(); })
      .def_property_readonly("closed", [](const Comm& comm) { return comm.core->closed(); })
      .def_property_readonly("failed", [](const Comm& comm) { return comm.core->group().failed(); })
      .def_property_readonly(
          "family_failed",
          [](const Comm& comm) { return comm.core->group().endpoint().first_failure().is_set(); })
      .def("record_error",
           [](const Comm& comm, const std::string& error) {
             comm.core->group().endpoint().record_program_error(error);
           })
      .def("unacknowledged_failure",
           [](const Comm& comm) { return told_if_unacknowledged(comm.core->group().failure()); })
      .def("abort",
           [](Comm& comm, const std::string& reason) {
             const pybind11::gil_scoped_release no_gil;
             comm.core->abort(reason);
           })
      .def("run_by_default",
           [](Comm& comm, const Schedule& schedule) {
             const pybind11::gil_scoped_release no_gil;
             comm.core->run_by_default(schedule);
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
        comm.algorithms.clear();  // functions may hold this communicator
      });
}

// A Python function as what an operation calls when it is complete. It runs on one of the threads,
// with the GIL, and may do whatever the program does: the thread that completes the operation only
// hands it over. Throws an Error where no thread can be started.
std::function<void()> python_callback(const std::shared_ptr<CallbackThreads>& threads,
                                      pybind11::function call);

template <class Work, class... Options>
void define_common_work_methods(pybind11::class_<Work, Options...>& type) {
  type.def("describe", [](const Work& work) { return work.operation->describe(); })
      .def(
          "when_complete",
          [](Work& work, pybind11::function call) {
            if (work.operation->is_complete()) {
              call();
              return;
            }
            auto hand_over = python_callback(work.communicator->callbacks, std::move(call));
            const pybind11::gil_scoped_release no_gil;
            work.operation->when_complete(std::move(hand_over));
          },
          pybind11::arg("call"));
}

// Throws Unsupported where wait() is given no seconds.
void check_wait(double timeout);

}  // namespace dpcore
