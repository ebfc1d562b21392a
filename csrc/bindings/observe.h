// What a communicator shows of itself: counters, traces, its latency without Python.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/py_work.h"

namespace dpcore {

pybind11::dict stats_of(PyCommunicator& comm);
pybind11::list stop_trace(PyCommunicator& comm);
// Seconds per all-reduce of an arena buffer, measured without Python in between.
double latency_loop(PyCommunicator& comm, size_t bytes, int iterations);

}  // namespace dpcore
