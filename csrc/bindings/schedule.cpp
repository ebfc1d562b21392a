// Schedules in Python: build one by name or from a list of one's own, prove it, price it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/call_arguments.h"
#include "bindings/observe.h"
#include "comm/base/error.h"
#include "comm/schedule/check.h"
#include "comm/schedule/choice.h"
#include "comm/schedule/cost.h"
#include "comm/schedule/program.h"
#include "comm/schedule/schedule.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// (name, gives, gets, reduces, comes from root, goes to root)
using TraitsTuple = std::tuple<std::string_view, const char*, const char*, bool, bool, bool>;

std::vector<TraitsTuple> collectives() {
  constexpr std::array kExtents{"nothing", "whole", "own part", "all parts"};
  const auto word = [&](Extent extent) { return kExtents[static_cast<size_t>(extent)]; };
  std::vector<TraitsTuple> rows;
  for (const CollectiveTraits& one : kCollectives) {
    rows.emplace_back(one.name, word(one.gives), word(one.gets), one.reduces, one.comes_from_root,
                      one.goes_to_root);
  }
  return rows;
}

// (step, src, dst, chunk, reduce)
using MoveTuple = std::tuple<int, int, int, int, bool>;

// A value that pybind11 knows the type of.
template <class Value>
Value converted(py::handle value, const char* name, const char* wanted) {
  try {
    return value.cast<Value>();
  } catch (const py::cast_error&) {
    throw CallArguments::unfit(name, wanted, value);
  }
}

std::vector<MoveTuple> moves_in(py::handle value, const char* name) {
  return converted<std::vector<MoveTuple>>(
      value, name, "a list of moves (step, src, dst, chunk, reduce) of integers");
}

std::vector<int> integers_in(py::handle value, const char* name) {
  return converted<std::vector<int>>(value, name, "a list of integers");
}

const Schedule* schedule_in(py::handle value, const char* name) {
  if (value.is_none()) {
    throw CallArguments::unfit(name, "a dpcore.Schedule", value);
  }
  return converted<const Schedule*>(value, name, "a dpcore.Schedule");
}
using ScheduleArgument = NamedArgument<"schedule", schedule_in>;

Schedule schedule_from_lists(TextArgument<"algorithm"> algorithm,
                             TextArgument<"collective"> collective, IntegerArgument<"world"> world,
                             IntegerArgument<"chunks"> chunks,
                             NamedArgument<"moves", moves_in> listed, IntegerArgument<"root"> root,
                             FlagArgument<"ordered"> ordered) {
  const std::vector<MoveTuple>& moves = listed.value;
  Schedule schedule{.algorithm = std::string(algorithm.value),
                    .collective = parse_collective(collective),
                    .world = world,
                    .chunks = chunks,
                    .root = root,
                    .ordered = ordered,
                    .moves = {}};
  schedule.moves.reserve(moves.size());
  for (const auto& [step, src, dst, chunk, reduce] : moves) {
    schedule.moves.push_back({step, src, dst, chunk, reduce});
  }
  return schedule;
}

std::vector<MoveTuple> moves_of(const Schedule& schedule) {
  std::vector<MoveTuple> moves;
  moves.reserve(schedule.moves.size());
  for (const Move& move : schedule.moves) {
    moves.emplace_back(move.step, move.src, move.dst, move.chunk, move.reduce);
  }
  return moves;
}

std::string collective_name_of(const Schedule& schedule) {
  return std::string(name_of(schedule.collective));
}

std::string repr_of(const Schedule& schedule) {
  return "<Schedule '" + schedule.algorithm + "' " + collective_name_of(schedule) + ", " +
         std::to_string(schedule.world) + " ranks, " + std::to_string(schedule.chunks) +
         " chunks, " + std::to_string(schedule.moves.size()) + " moves>";
}

py::dict cost_dict(ScheduleArgument schedule, NaturalArgument<"count"> count,
                   NaturalArgument<"element_bytes"> element_bytes) {
  check(*schedule.value);  // pricing indexes by the ranks and chunks in the list
  const Cost cost = cost_of(*schedule.value, count, element_bytes);
  py::dict result;
  result["steps"] = cost.steps;
  result["sent_bytes"] = cost.sent_bytes;
  result["received_bytes"] = cost.received_bytes;
  result["max_bytes_per_rank"] = cost.max_bytes_per_rank;
  result["critical_bytes"] = cost.critical_bytes;
  result["critical_reduced_bytes"] = cost.critical_reduced_bytes;
  return result;
}

}  // namespace

void register_schedule(py::module_& m) {
  py::class_<Schedule>(m, "Schedule", "A list of moves (step, src, dst, chunk, reduce).")
      .def(py::init(&schedule_from_lists), py::arg("algorithm"), py::arg("collective"),
           py::arg("world"), py::arg("chunks"), py::arg("moves"), py::arg("root") = 0,
           py::arg("ordered") = false,
           "A schedule of one's own. check_schedule tells whether it is right.")
      .def_readonly("algorithm", &Schedule::algorithm)
      .def_property_readonly("collective", &collective_name_of)
      .def_readonly("world", &Schedule::world)
      .def_readonly("chunks", &Schedule::chunks)
      .def_readonly("root", &Schedule::root)
      .def_readonly("ordered", &Schedule::ordered)
      .def_property_readonly("moves", &moves_of)
      .def("__repr__", &repr_of)
      .def(
          "__reduce__",
          [](const py::object& self) {
            const auto& schedule = self.cast<const Schedule&>();
            return py::make_tuple(
                py::type::of(self),
                py::make_tuple(schedule.algorithm, collective_name_of(schedule), schedule.world,
                               schedule.chunks, moves_of(schedule), schedule.root,
                               schedule.ordered));
          },
          "For pickle and copy: by what it was made of.")
      .def(
          "_repr_html_",
          [](const py::object& self) {
            return py::module_::import("dpcore.base.plugged_in").attr("page_of_schedule")(self);
          },
          "For notebooks: move by move.");

  m.def(
      "schedule",
      [](TextArgument<"algorithm"> algorithm, TextArgument<"collective"> collective,
         IntegerArgument<"world"> world, IntegerArgument<"root"> root,
         const NamedArgument<"hosts", integers_in>& hosts) {
        return make_schedule(algorithm, parse_collective(collective), world, root, hosts.value);
      },
      py::arg("algorithm"), py::arg("collective"), py::arg("world"), py::arg("root") = 0,
      py::arg("hosts") = std::vector<int>(),
      "The moves of a known algorithm. hosts: equal numbers for ranks that share one.");
  m.def("collectives", &collectives, "What each collective is, a row of the core's table each.");
  m.def(
      "algorithms_of",
      [](TextArgument<"collective"> collective) {
        return algorithms_of(parse_collective(collective));
      },
      py::arg("collective"), "The names that schedule() takes for a collective.");
  m.def("check_algorithm_name", &check_algorithm_name, py::arg("name"),
        "Raises Unsupported unless it is \"auto\", or the name of a collective's algorithm.");
  m.def(
      "check_schedule", [](ScheduleArgument schedule) { check(*schedule.value); },
      py::arg("schedule"),
      "Raises Error, naming the first wrong move, unless the schedule is right for any data.");
  m.def("completing_moves", &completing_moves, py::arg("schedule"),
        "For each move, whether it reduces and its destination is complete after its step.");
  m.def(
      "order_of_chunks",
      [](const Schedule& schedule, int rank) {
        check(schedule);
        return order_of_chunks(schedule, rank);
      },
      py::arg("schedule"), py::arg("rank"),
      "All chunks in the order in which a rank works at them: those it sends, as it does, then "
      "those it receives, then the others.");
  m.def(
      "turns",
      [](const Schedule& schedule, int rank) {
        std::vector<std::tuple<int, int, int, int, int, size_t>> found;
        const auto program = compile(schedule, rank);
        for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
          for (const LaneStep& step : program->lanes[chunk]) {
            for (size_t i = 0; i < step.sends.size(); ++i) {
              const Turn& turn = step.turns[i];
              found.emplace_back(step.step, step.sends[i], chunk, turn.source, turn.chunk,
                                 turn.segments_ago);
            }
          }
        }
        return found;
      },
      py::arg("schedule"), py::arg("rank"),
      "For each message that a rank sends: its step, receiver and chunk, and the source and chunk "
      "of the message that has to come first where senders take turns, so many segments ago. "
      "The source is -1 where the message need not wait.");
  m.def("is_ordered", &is_ordered, py::arg("schedule"),
        "Whether all contributions to a chunk are added at once, in rank order.");
  m.def("schedule_cost", &cost_dict, py::arg("schedule"), py::arg("count"),
        py::arg("element_bytes"),
        "Steps and bytes. count is the whole buffer for all_reduce, broadcast and reduce, and one "
        "chunk for the others.");
  m.def(
      "expected_seconds",
      [](const Schedule& schedule, const std::vector<int>& hosts, const CostList& costs,
         size_t nbytes) {
        check(schedule);
        if (hosts.size() != static_cast<size_t>(schedule.world) ||
            *std::min_element(hosts.begin(), hosts.end()) < 0) {
          throw Unsupported("hosts: name one, from 0 on, for each of " +
                            std::to_string(schedule.world) + " ranks");
        }
        return estimate(schedule, hosts, costs_of(costs)).seconds(nbytes);
      },
      py::arg("schedule"), py::arg("hosts"), py::arg("costs"), py::arg("nbytes"),
      "What the choice of algorithms expects of a schedule; costs as default_costs() lists them.");
  m.def(
      "chunk_range",
      [](size_t count, int chunks, int index) {
        if (chunks < 1 || index < 0 || index >= chunks) {
          throw Unsupported("chunk " + std::to_string(index) + " of " + std::to_string(chunks) +
                            ": choose 0 <= index < chunks");
        }
        const ElementRange range = chunk_range(count, chunks, index);
        return std::pair(range.begin, range.end);
      },
      py::arg("count"), py::arg("chunks"), py::arg("index"),
      "The bounds (begin, end) of one of `chunks` nearly equal parts of `count` elements.");
}

}  // namespace dpcore
