// The cost model in Python: its constants as a list, and what a communicator would choose.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>

#include "bindings/py_work.h"

namespace dpcore {

// Of memory: step, message, byte; the same of the network; an added byte. In seconds.
using CostList = std::array<double, 7>;
CostConstants costs_of(const CostList& list);
CostList list_of(const CostConstants& costs);

pybind11::dict explanation_of(PyCommunicator& comm, const std::string& collective, size_t bytes);

}  // namespace dpcore
