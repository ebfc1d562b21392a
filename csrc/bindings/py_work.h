// Communicators and asynchronous operations as Python holds them: an operation with the objects
// whose memory it uses. Dropping it early is safe: the communicator then keeps the objects until
// the operation is complete.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/known_algorithms.h"
#include "comm/base/callback_threads.h"
#include "comm/communicator.h"

namespace dpcore {

// What communicators on hosts and on devices have in common here; `core` is the one of the core.
// All of it is touched with the GIL.
template <class Core, class Operation>
struct HeldCommunicator {
  HeldCommunicator() = default;
  HeldCommunicator(const HeldCommunicator&) = delete;
  HeldCommunicator& operator=(const HeldCommunicator&) = delete;
  // The GIL is let go while the core waits: ranks may be threads of this process, and callbacks
  // want it. The buffers of what is in flight go after that.
  ~HeldCommunicator() {
    const pybind11::gil_scoped_release no_gil;
    core.reset();
    callbacks->stop();
  }

  std::shared_ptr<Core> core;
  std::shared_ptr<CallbackThreads> callbacks = std::make_shared<CallbackThreads>();
  KnownAlgorithms algorithms;
  std::string device_name = "cpu";  // of its tensors, as torch writes it: "cuda:0", "cpu"

  Buffer buffer(pybind11::handle object, const char* role, Access access, Elements elements) const {
    return buffer_of(object, role, access, elements, device_name);
  }

  // Operations in flight whose handle is gone.
  struct Orphan {
    std::shared_ptr<Operation> operation;
    std::vector<HeldBuffer> buffers;
  };
  std::vector<Orphan> orphans;
  void let_go_of_completed() {
    if (orphans.empty()) {
      return;
    }
    const auto done = std::stable_partition(
        orphans.begin(), orphans.end(),
        [](const Orphan& orphan) { return !orphan.operation->is_complete(); });
    // They go at the end: letting go of an object may run Python code, which may call us again.
    const std::vector<Orphan> gone(std::make_move_iterator(done),
                                   std::make_move_iterator(orphans.end()));
    orphans.erase(done, orphans.end());
  }
};

template <class Communicator, class Operation>
struct HeldWork {
  HeldWork(std::shared_ptr<Communicator> made_by, std::shared_ptr<Operation> running,
           std::vector<HeldBuffer> used)
      : communicator(std::move(made_by)), operation(std::move(running)), buffers(std::move(used)) {}
  ~HeldWork() {
    if (operation && !operation->is_complete()) {
      communicator->orphans.push_back({std::move(operation), std::move(buffers)});
    }
  }

  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Operation> operation;
  std::vector<HeldBuffer> buffers;
};

struct PyCommunicator : HeldCommunicator<Communicator, Operation> {
  // What is in flight uses buffers that go with this object. Another owner of the core, such as a
  // reducer, keeps it from waiting for that.
  ~PyCommunicator();
};

struct PyWork : HeldWork<PyCommunicator, Operation> {
  using HeldWork::HeldWork;
  void let_go_when_complete();
};

// The optional arguments that all collectives share, as Python gave them.
struct Call {
  std::shared_ptr<const CallAlgorithm> algorithm;  // or none
  int priority = 0;
  double timeout = 0;
  uint64_t layout = 0;
  bool asynchronous = false;

  const CallAlgorithm& algorithm_or_own() const {
    static const CallAlgorithm kOwn{""};
    return algorithm ? *algorithm : kOwn;
  }
};

// Adds the methods that move data to the Python class (collectives.cpp).
void define_collectives(pybind11::handle type);

// What the program is told of a failure: the name of the class in dpcore.errors, and the message.
pybind11::tuple told(const FirstFailure& failure);

// The same of one that the program does not know yet, otherwise None.
pybind11::object told_if_unacknowledged(const FirstFailure& failure);

// Sets the Python error for one of the core's; false when `problem` is none of those.
bool set_python_error(const std::exception_ptr& problem);

// Runs pending Python signal handlers; throws what they raise. For waits without the GIL.
void check_signals();

}  // namespace dpcore
