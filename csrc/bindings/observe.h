// What a communicator shows of itself: counters, traces, its latency without Python.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/py_work.h"

namespace dpcore {

pybind11::dict stats_of(PyCommunicator& comm);
// What was recorded as Python reads it: events, how many more there were, and the lists of moves
// that the recorder has kept, by the number that events name them by.
pybind11::tuple recording_of(const std::vector<TraceEvent>& events, uint64_t dropped,
                             TraceRecorder& recorder);
pybind11::tuple stop_trace(PyCommunicator& comm);
// Seconds per all-reduce of an arena buffer, measured without Python in between.
double latency_loop(PyCommunicator& comm, size_t bytes, int iterations);

}  // namespace dpcore
