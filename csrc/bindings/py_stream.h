// A communicator for a device, and its operations, as Python holds them.
#pragma once

#include "bindings/py_work.h"
#include "cuda/stream/stream_communicator.h"

namespace dpcore {

struct PyStreamCommunicator : HeldCommunicator<StreamCommunicator, StreamWork> {
  // The stream that torch's work of this thread goes to now.
  Device::Stream current_stream() const { return current_stream_of(device_name); }
};

using PyStreamWork = HeldWork<PyStreamCommunicator, StreamWork>;

// Adds the methods that move data, whose arguments collectives.cpp reads for both kinds.
void define_stream_collectives(pybind11::handle type);

pybind11::object perform(PyStreamCommunicator& comm, pybind11::handle self, Request&& request,
                         const Call& call, Buffer&& output, Buffer&& input);
pybind11::object perform(PyStreamCommunicator& comm, pybind11::handle self, const MessageCall& call,
                         bool asynchronous, Buffer&& buffer);

}  // namespace dpcore
