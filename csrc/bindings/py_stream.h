// A communicator for a device, and its operations, as Python holds them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/orphans.h"
#include "comm/base/callback_threads.h"
#include "cuda/stream/stream_communicator.h"

namespace dpcore {

struct PyStreamCommunicator {
  PyStreamCommunicator() = default;
  PyStreamCommunicator(const PyStreamCommunicator&) = delete;
  PyStreamCommunicator& operator=(const PyStreamCommunicator&) = delete;
  // With the GIL, which is let go while the core waits for what is in flight.
  ~PyStreamCommunicator() {
    const pybind11::gil_scoped_release no_gil;
    core.reset();
    callbacks->stop();
  }

  std::shared_ptr<StreamCommunicator> core;
  std::shared_ptr<CallbackThreads> callbacks = std::make_shared<CallbackThreads>();
  std::string device_name;  // of its tensors, as torch writes it: "cuda:0", "cpu"

  Buffer buffer(pybind11::handle object, const char* role, Access access) const {
    return buffer_of(object, role, access, device_name);
  }
  // The stream that torch's work of this thread goes to now.
  Device::Stream current_stream() const { return current_stream_of(device_name); }

  // Buffers of works that nobody holds any more, until they are complete. With the GIL.
  struct Orphan {
    StreamCommunicator::Work work;
    std::vector<HeldBuffer> buffers;
  };
  std::vector<Orphan> orphans;
  void let_go_of_completed() {
    if (!orphans.empty()) {
      dpcore::let_go_of_completed(orphans,
                                  [](const Orphan& orphan) { return orphan.work->is_complete(); });
    }
  }
};

struct PyStreamWork {
  std::shared_ptr<PyStreamCommunicator> communicator;
  StreamCommunicator::Work work;
  std::vector<HeldBuffer> buffers;

  ~PyStreamWork() {
    if (work && !work->is_complete()) {
      communicator->orphans.push_back({std::move(work), std::move(buffers)});
    }
  }
};

// Adds whole() and parted(), whose arguments collectives.cpp reads for both kinds.
void define_stream_collectives(pybind11::handle type);

struct Call;
pybind11::object perform(PyStreamCommunicator& comm, pybind11::handle self, Request&& request,
                         const Call& call, Buffer&& output, Buffer&& input);

}  // namespace dpcore
