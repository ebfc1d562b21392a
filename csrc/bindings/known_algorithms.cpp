// See known_algorithms.h.
#include "bindings/known_algorithms.h"

#include <string>
#include <utility>

#include "bindings/call_arguments.h"
#include "comm/schedule/schedule.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// As is_own() of dpcore/base/user_code.py has it.
bool names_file(const std::string& text) {
  return text.find(':') != std::string::npos || text.ends_with(".py") || text.ends_with(".xml") ||
         text.ends_with(".json");
}

void check_kind(py::handle asked) {
  if (!py::isinstance<py::str>(asked) && PyCallable_Check(asked.ptr()) == 0 &&
      !py::hasattr(asked, "moves")) {
    throw py::type_error(
        std::string("algorithm: expected a name, FILE:NAME, a function of the number of ranks or a "
                    "dpcore.Schedule, not ") +
        Py_TYPE(asked.ptr())->tp_name);
  }
}

CallAlgorithm read(py::handle asked, int rank, int world) {
  if (py::isinstance<py::str>(asked)) {
    std::string name(CallArguments::text_of(asked, "algorithm"));
    if (!names_file(name)) {
      return {std::move(name)};
    }
  }
  auto schedule = py::reinterpret_borrow<py::object>(asked);
  if (!py::isinstance<Schedule>(schedule)) {
    const auto module = py::module_::import("dpcore.comm.communicators.own_schedules");
    schedule = module.attr("compiled")(asked, world);
  }
  const auto& moves = schedule.cast<const Schedule&>();
  return {moves.algorithm, compile(moves, rank)};
}

}  // namespace

std::shared_ptr<const CallAlgorithm> KnownAlgorithms::of(py::handle asked, int rank, int world) {
  if (asked.is_none()) {
    return nullptr;
  }
  check_kind(asked);  // before it is compared, which an array does not allow
  for (const Entry& entry : known_) {
    if (entry.asked.is(asked)) {
      return entry.algorithm;
    }
  }
  for (size_t i = 0; i < known_.size(); ++i) {
    const Entry entry = known_[i];  // a comparison may call Python, and that the communicator
    const int is_same = PyObject_RichCompareBool(entry.asked.ptr(), asked.ptr(), Py_EQ);
    if (is_same < 0) {
      throw py::error_already_set();
    }
    if (is_same != 0) {
      return entry.algorithm;
    }
  }
  auto algorithm = std::make_shared<const CallAlgorithm>(read(asked, rank, world));
  Entry made{py::reinterpret_borrow<py::object>(asked), algorithm};
  if (known_.size() < kMost) {
    known_.push_back(std::move(made));
  } else {
    std::swap(known_[oldest_], made);  // what goes may call Python, when all is in place
    oldest_ = (oldest_ + 1) % kMost;
  }
  return algorithm;
}

}  // namespace dpcore
