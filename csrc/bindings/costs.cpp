// Names for what Communicator::explain() says; sentences are made in dpcore/costs/explain.py.
#include "bindings/costs.h"

#include <pybind11/stl.h>

#include <cmath>

#include "comm/base/error.h"

namespace py = pybind11;

namespace dpcore {
namespace {

const char* name_of(Explanation::Way way) {
  switch (way) {
    case Explanation::Way::alone:
      return "alone";
    case Explanation::Way::memory:
      return "memory";
    case Explanation::Way::entry:
      return "entry";
    case Explanation::Way::messages:
      break;
  }
  return "messages";
}

}  // namespace

CostConstants costs_of(const CostList& list) {
  for (const double value : list) {
    if (!std::isfinite(value) || value < 0) {
      throw Unsupported("the costs of machine and network must be seconds, 0 or more");
    }
  }
  return {{list[0], list[1], list[2]}, {list[3], list[4], list[5]}, list[6]};
}

CostList list_of(const CostConstants& costs) {
  return {costs.memory.step_s,  costs.memory.message_s,  costs.memory.byte_s,
          costs.network.step_s, costs.network.message_s, costs.network.byte_s,
          costs.added_byte_s};
}

py::dict explanation_of(PyCommunicator& comm, const std::string& collective, size_t bytes) {
  Explanation why;
  const Collective kind = parse_collective(collective);
  {
    const py::gil_scoped_release no_gil;
    why = comm.core->explain(kind, bytes);
  }
  py::list candidates;
  for (const AlgorithmChoice::Candidate& candidate : why.candidates) {
    py::dict entry;
    entry["algorithm"] = candidate.algorithm;
    entry["seconds"] = candidate.estimate.seconds(bytes);
    entry["steps"] = candidate.estimate.steps;
    entry["network_bytes"] = candidate.estimate.network_share * static_cast<double>(bytes);
    entry["ordered"] = candidate.ordered;
    entry["allowed"] = candidate.allowed;
    candidates.append(entry);
  }
  py::dict result;
  result["way"] = name_of(why.way);
  result["algorithm"] = why.algorithm;
  result["asked"] = why.asked;
  result["candidates"] = candidates;
  return result;
}

}  // namespace dpcore
