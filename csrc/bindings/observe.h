// What a communicator shows of itself: counters, traces, its latency without Python, its costs and
// what it would choose by them.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>
#include <vector>

#include "bindings/py_work.h"

namespace dpcore {

pybind11::dict stats_of(PyCommunicator& comm);
// What was recorded as Python reads it: the fields of dpcore.recorder.file.Event for each event,
// how many more there were, and the lists of moves that the recorder has kept, by what events call
// them.
pybind11::tuple recording_of(const std::vector<TraceEvent>& events, uint64_t dropped,
                             TraceRecorder& recorder);
pybind11::tuple stop_trace(PyCommunicator& comm);
// Seconds per all-reduce of an arena buffer, measured without Python in between.
double latency_loop(PyCommunicator& comm, size_t bytes, int iterations);

// Of memory: step, message, byte; the same of the network; an added byte. In seconds.
using CostList = std::array<double, 7>;
CostConstants costs_of(const CostList& list);
CostList list_of(const CostConstants& costs);
// Sentences are made of it in dpcore/comm/communicators/explain.py.
pybind11::dict explanation_of(PyCommunicator& comm, const std::string& collective, size_t bytes);

}  // namespace dpcore
