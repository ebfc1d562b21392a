// Reads what the core has counted, recorded and chosen; nothing here is on the path of an
// operation.
#include "bindings/observe.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <unordered_map>

#include "comm/base/clock.h"
#include "comm/base/error.h"

namespace py = pybind11;

namespace dpcore {

namespace {

// By Explanation::Way.
constexpr std::array kWays = {"alone", "memory", "entry", "messages"};

}  // namespace

py::dict stats_of(PyCommunicator& comm) {
  py::dict result;
  for (int kind = 0; kind < kCollectiveCount; ++kind) {
    py::dict paths;
    for (int path = 0; path < kPathCount; ++path) {
      const auto collective = static_cast<Collective>(kind);
      const PathCounters& counters =
          comm.core->shared().counters(collective, static_cast<Path>(path));
      if (counters.operations.load() > 0) {
        py::dict entry;
        entry["operations"] = counters.operations.load();
        entry["bytes"] = counters.bytes.load();
        entry["peer_reads"] = counters.peer_reads.load();
        entry["peer_writes"] = counters.peer_writes.load();
        paths[name_of(static_cast<Path>(path), collective)] = entry;
      }
    }
    if (!paths.empty()) {
      result[py::str(std::string(name_of(static_cast<Collective>(kind))))] = paths;
    }
  }
  const Transport::Sent sent = comm.core->shared().sent();
  py::dict ways;
  ways["memory"] = sent.memory;
  ways["network"] = sent.network;
  result["sent"] = ways;
  py::dict arena;
  arena["bytes"] = comm.core->endpoint().arena().size();
  arena["used"] = comm.core->endpoint().arena().used_bytes();
  result["arena"] = arena;
  return result;
}

py::tuple recording_of(const std::vector<TraceEvent>& events, uint64_t dropped,
                       TraceRecorder& recorder) {
  static constexpr const char* kKinds[] = {"operation", "wait",   "exposed", "mark",
                                           "ready",     "launch", "compute"};
  struct List {
    std::string number;  // text: the numbers of JSON are too short
    std::string algorithm;
  };
  std::unordered_map<uint64_t, List> lists;
  py::dict schedules;
  for (const auto& [identity, schedule] : recorder.take_schedules()) {
    char number[17];
    std::snprintf(number, sizeof(number), "%016llx", static_cast<unsigned long long>(identity));
    lists[identity] = {number, schedule->algorithm};
    schedules[number] = py::cast(*schedule);
  }
  py::list found;
  for (const TraceEvent& event : events) {
    // The number that an event of a model gives is the model's.
    const bool of_model = event.kind == EventKind::ready || event.kind == EventKind::launch ||
                          event.kind == EventKind::compute;
    const auto list = of_model ? lists.end() : lists.find(event.schedule);
    const bool has_list = list != lists.end();
    found.append(py::make_tuple(event.name, kKinds[static_cast<int>(event.kind)], event.peer,
                                event.thread, event.operation, event.bytes, event.begin_ns,
                                event.end_ns,
                                has_list ? list->second.algorithm + "/" + event.path : event.path,
                                has_list ? list->second.number : "", event.root, event.world,
                                of_model ? event.schedule : 0));
  }
  return py::make_tuple(found, dropped, schedules);
}

py::tuple stop_trace(PyCommunicator& comm) {
  TraceRecorder& recorder = comm.core->endpoint().trace();
  uint64_t dropped = 0;
  const std::vector<TraceEvent> events = recorder.stop(&dropped);
  return recording_of(events, dropped, recorder);
}

double latency_loop(PyCommunicator& comm, size_t bytes, int iterations) {
  const auto memory = comm.core->allocate(std::max<size_t>(bytes, 4));
  std::fill_n(memory.get(), std::max<size_t>(bytes, 4), std::byte{0});
  Request request;
  request.collective = Collective::all_reduce;
  request.dtype = DType::f32;
  request.input = memory.get();
  request.output = memory.get();
  request.count = bytes / sizeof(float);
  const int64_t begin = now_ns();
  for (int i = 0; i < iterations; ++i) {
    comm.core->run(Request(request), "", nullptr);
  }
  return static_cast<double>(now_ns() - begin) * 1e-9 / iterations;
}

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
  result["way"] = kWays[static_cast<size_t>(why.way)];
  result["algorithm"] = why.algorithm;
  result["asked"] = why.asked;
  result["is_own"] = why.is_own;
  result["candidates"] = candidates;
  return result;
}

}  // namespace dpcore
