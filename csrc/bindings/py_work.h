// An asynchronous operation as Python holds it: the operation and the objects whose memory it
// uses. Dropping it early is safe: the communicator then keeps the objects until the operation
// is complete.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/orphans.h"
#include "comm/base/callback_threads.h"
#include "comm/communicator.h"

namespace dpcore {

// A communicator as Python holds it.
struct PyCommunicator {
  PyCommunicator() = default;
  PyCommunicator(const PyCommunicator&) = delete;
  PyCommunicator& operator=(const PyCommunicator&) = delete;
  // With the GIL, which is let go while the core waits: ranks may be threads of this process, and
  // callbacks want it. The buffers of what is in flight go after that.
  ~PyCommunicator() {
    const pybind11::gil_scoped_release no_gil;
    core.reset();
    callbacks->stop();
  }

  std::shared_ptr<Communicator> core;
  std::shared_ptr<CallbackThreads> callbacks = std::make_shared<CallbackThreads>();
  struct Orphan {
    Work operation;
    std::vector<HeldBuffer> buffers;
  };
  std::vector<Orphan> orphans;  // with the GIL

  Buffer buffer(pybind11::handle object, const char* role, Access access) const {
    return buffer_of(object, role, access);
  }

  void let_go_of_completed() {
    if (!orphans.empty()) {
      dpcore::let_go_of_completed(
          orphans, [](const Orphan& orphan) { return orphan.operation->is_complete(); });
    }
  }
};

struct PyWork {
  std::shared_ptr<PyCommunicator> communicator;
  Work operation;
  std::vector<HeldBuffer> buffers;

  PyWork(std::shared_ptr<PyCommunicator> communicator, Work operation,
         std::vector<HeldBuffer> buffers);
  ~PyWork();

  // With the GIL.
  void let_go_when_complete();
};

// Adds the methods that move data to the Python class (collectives.cpp).
void define_collectives(pybind11::handle type);

// What the program is told of a failure: the name of the class in dpcore.errors, and the message.
pybind11::tuple told(const Group& group);

// The same of a communicator that failed and whose program does not know yet, otherwise None.
pybind11::object unheard_failure_of(const Group& group);

// Runs pending Python signal handlers; throws what they raise. For waits without the GIL.
void check_signals();

}  // namespace dpcore
