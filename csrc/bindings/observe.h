// What a communicator shows of itself: counters, traces, its latency without Python.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/py_work.h"

namespace dpcore {

pybind11::dict stats_of(PyCommunicator& comm);
// Events as Python reads them; the last entry says how many more there were.
pybind11::list list_of(const std::vector<TraceEvent>& events, uint64_t dropped);
pybind11::list stop_trace(PyCommunicator& comm);
// Seconds per all-reduce of an arena buffer, measured without Python in between.
double latency_loop(PyCommunicator& comm, size_t bytes, int iterations);

}  // namespace dpcore
