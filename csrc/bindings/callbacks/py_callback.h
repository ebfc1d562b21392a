// A Python function as what an operation calls when it is complete.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <utility>

#include "comm/base/callback_threads.h"

namespace dpcore {

// It runs on one of the threads, with the GIL, and may do whatever the program does: the thread
// that completes the operation only hands it over. Throws an Error where no thread can be started.
inline std::function<void()> python_callback(const std::shared_ptr<CallbackThreads>& threads,
                                             pybind11::function call) {
  threads->be_ready();
  // Whoever drops it last has the GIL or takes it. That must not be the thread that completes the
  // operation, since the end of a communicator may hang on it: so it gives its reference away.
  std::shared_ptr<pybind11::function> held(new pybind11::function(std::move(call)),
                                           [](pybind11::function* function) {
                                             const pybind11::gil_scoped_acquire gil;
                                             delete function;
                                           });
  return [threads, held = std::move(held)]() mutable {
    threads->run([held = std::move(held)] {
      const pybind11::gil_scoped_acquire gil;
      try {
        (*held)();
      } catch (pybind11::error_already_set& problem) {
        problem.discard_as_unraisable("dpcore.Work.when_complete");
      }
    });
  };
}

}  // namespace dpcore
