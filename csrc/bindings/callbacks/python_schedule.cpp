// dpcore.LaunchSchedule as the reducer sees it, and dpcore._C.LaunchControl, which its methods get.
//
// Events whose method is not defined are not listened to, so a schedule written in Python takes
// the GIL only for what it wants. The control is lent for the time of an event: a schedule that
// keeps it gets an error and not a dangling pointer.
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/callbacks/callbacks.h"
#include "bindings/known_algorithms.h"
#include "comm/base/error.h"

namespace py = pybind11;

namespace dpcore {
namespace {

constexpr std::array<std::pair<const char*, LaunchSchedule::Event>, 7> kEvents = {{
    {"gradient_ready", LaunchSchedule::gradient_ready},
    {"bucket_ready", LaunchSchedule::bucket_ready},
    {"bucket_complete", LaunchSchedule::bucket_complete},
    {"slice_complete", LaunchSchedule::slice_complete},
    {"backward_end", LaunchSchedule::backward_end},
    {"forward_begin", LaunchSchedule::forward_begin},
    {"optimizer_step", LaunchSchedule::optimizer_step},
}};

class LentControl {
 public:
  LentControl(LaunchControl& control, KnownAlgorithms& algorithms)
      : control_(&control), algorithms_(&algorithms) {}
  void end() { control_ = nullptr; }
  LaunchControl& get() const {
    if (control_ == nullptr) {
      throw Error("a schedule used its LaunchControl after the event that it came with");
    }
    return *control_;
  }
  // For a call that names this bucket.
  LaunchControl& about(size_t bucket) const {
    if (const size_t buckets = get().buckets(); bucket >= buckets) {
      throw std::out_of_range("there is no bucket " + std::to_string(bucket) +
                              ": control.buckets is " + std::to_string(buckets) +
                              ", and they are numbered from 0");
    }
    return *control_;
  }
  // As the schedule asks for it.
  std::shared_ptr<const CallAlgorithm> algorithm(py::handle asked) const {
    return algorithms_->of(asked, get().rank(), get().world());
  }

 private:
  LaunchControl* control_;
  KnownAlgorithms* algorithms_;
};

class PythonSchedule final : public LaunchSchedule {
 public:
  explicit PythonSchedule(py::object schedule)
      : schedule_(std::move(schedule)),
        name_(py::type::of(schedule_).attr("__name__").cast<std::string>()) {
    for (const py::handle heard : schedule_.attr("listens_to")()) {
      for (const auto& [method, event] : kEvents) {
        listens_ |= heard.cast<std::string>() == method ? static_cast<uint32_t>(event) : 0;
      }
    }
  }
  ~PythonSchedule() override {
    const py::gil_scoped_acquire gil;
    schedule_ = {};
    algorithms_.clear();
  }

  std::string name() const override { return name_; }
  uint32_t listens() const override { return listens_; }
  bool may_join() const override { return true; }
  Phases phases() const override { return Phases(list<std::string>("phases")); }
  size_t whole_buckets() const override { return value<size_t>("whole_buckets"); }
  bool is_exact() const override { return value<bool>("is_exact"); }
  std::vector<uint64_t> caps(std::vector<uint64_t> wanted) const override {
    std::vector<uint64_t> caps = list<uint64_t>("caps", wanted);
    if (caps.empty()) {
      throw Error("schedule '" + name_ +
                  "': caps() returns no size of buckets; return at least one, in bytes");
    }
    return caps;
  }
  std::vector<size_t> order(size_t buckets) const override {
    return list<size_t>("order", buckets);
  }
  std::vector<Slice> slices(std::span<const uint64_t> bytes) const override {
    std::vector<Slice> all;
    const std::vector<uint64_t> sizes(bytes.begin(), bytes.end());
    for (const auto& [bucket, begin, end] :
         list<std::tuple<size_t, uint64_t, uint64_t>>("slices", sizes)) {
      all.push_back({.bucket = bucket, .begin = begin, .end = end});
    }
    return all;
  }

  void on_gradient_ready(LaunchControl& control, size_t gradient) override {
    tell("gradient_ready", control, gradient);
  }
  void on_bucket_ready(LaunchControl& control, size_t bucket) override {
    tell("bucket_ready", control, bucket);
  }
  void on_bucket_complete(LaunchControl& control, size_t bucket) override {
    tell("bucket_complete", control, bucket);
  }
  void on_slice_complete(LaunchControl& control, size_t bucket, size_t slice) override {
    tell("slice_complete", control, bucket, slice);
  }
  void on_backward_end(LaunchControl& control) override { tell("backward_end", control); }
  void on_forward_begin(LaunchControl& control, size_t module) override {
    tell("forward_begin", control, module);
  }
  void on_optimizer_step(LaunchControl& control) override { tell("optimizer_step", control); }

 private:
  template <class T>
  T value(const char* method) const {
    const py::gil_scoped_acquire gil;
    return schedule_.attr(method)().cast<T>();
  }
  template <class T, class... Arguments>
  std::vector<T> list(const char* method, const Arguments&... arguments) const {
    const py::gil_scoped_acquire gil;
    const py::object given = schedule_.attr(method)(arguments...);
    try {
      if (py::isinstance<py::iterable>(given)) {
        return py::list(given).cast<std::vector<T>>();
      }
    } catch (const py::cast_error&) {  // of numbers that are none
    }
    throw Error("schedule '" + name_ + "': " + method + "() returns " +
                py::repr(given).cast<std::string>() + "; see LaunchSchedule." + method);
  }

  template <class... Arguments>
  void tell(const char* method, LaunchControl& control, Arguments... arguments) {
    const py::gil_scoped_acquire gil;
    const auto lent = std::make_shared<LentControl>(control, algorithms_);
    const struct Ended {
      LentControl& lent;
      ~Ended() { lent.end(); }
    } ended{*lent};
    schedule_.attr(method)(lent, arguments...);
  }

  py::object schedule_;
  std::string name_;
  uint32_t listens_ = 0;
  KnownAlgorithms algorithms_;  // that it has launched buckets with
};

}  // namespace

std::shared_ptr<LaunchSchedule> launch_schedule_of(const py::object& schedule) {
  if (py::isinstance<py::str>(schedule)) {
    return make_launch_schedule(schedule.cast<std::string>());
  }
  if (!py::hasattr(schedule, "listens_to")) {
    throw Unsupported(std::string("schedule: expected a name or a dpcore.LaunchSchedule, not ") +
                      Py_TYPE(schedule.ptr())->tp_name);
  }
  return std::make_shared<PythonSchedule>(schedule);
}

namespace {

// A question to the control: answered at once, with the GIL held.
template <class Answer>
auto question(Answer (LaunchControl::*ask)() const) {
  return [ask](const LentControl& control) { return (control.get().*ask)(); };
}
template <class Answer>
auto question(Answer (LaunchControl::*ask)(size_t) const) {
  return [ask](const LentControl& control, size_t b) { return (control.about(b).*ask)(b); };
}

// A call that may wait.
auto call(void (LaunchControl::*what)(size_t)) {
  return [what](LentControl& control, size_t bucket) {
    const py::gil_scoped_release no_gil;
    (control.about(bucket).*what)(bucket);
  };
}

// For a call that names these buckets.
LaunchControl& about(const LentControl& control, const std::vector<size_t>& buckets) {
  for (const size_t bucket : buckets) {
    control.about(bucket);
  }
  return control.get();
}

void launch(LentControl& control, const std::vector<size_t>& buckets, int priority, bool background,
            const py::object& algorithm) {
  about(control, buckets);
  const Launch how{priority, background, control.algorithm(algorithm)};
  const py::gil_scoped_release no_gil;
  control.get().launch(buckets, how);
}

void launch_one(LentControl& control, size_t bucket, int priority, bool background,
                const py::object& algorithm, std::optional<size_t> slice) {
  if (!slice) {
    launch(control, {bucket}, priority, background, algorithm);
    return;
  }
  control.about(bucket);
  const Launch how{priority, background, control.algorithm(algorithm)};
  const py::gil_scoped_release no_gil;
  control.get().launch_slice(bucket, *slice, how);
}

void update(LentControl& control, const std::vector<size_t>& buckets) {
  const py::gil_scoped_release no_gil;
  about(control, buckets).update(buckets);
}

}  // namespace

void register_launch_control(py::module_& m) {
  py::class_<LentControl, std::shared_ptr<LentControl>>(m, "LaunchControl")
      .def_property_readonly("buckets", question(&LaunchControl::buckets))
      .def_property_readonly("rank", question(&LaunchControl::rank))
      .def_property_readonly("elapsed_ms", question(&LaunchControl::elapsed_ms))
      .def_property_readonly("in_flight",
                             [](const LentControl& control) {
                               const py::gil_scoped_release no_gil;
                               return control.get().in_flight();
                             })
      .def("bucket_of",
           [](const LentControl& control, size_t gradient) -> std::optional<size_t> {
             const size_t bucket = control.get().bucket_of(gradient);
             return bucket == LaunchControl::kNoBucket ? std::nullopt : std::optional(bucket);
           })
      .def("gradients_of_module",
           [](const LentControl& control, size_t module) {
             return control.get().gradients_of_module(module);
           })
      .def("max_over_ranks",
           [](LentControl& control, std::vector<double> values) {
             const py::gil_scoped_release no_gil;
             return control.get().max_over_ranks(std::move(values));
           })
      .def("slices", question(&LaunchControl::slices))
      .def("bytes", question(&LaunchControl::bytes))
      .def("is_complete", question(&LaunchControl::is_complete))
      .def("is_over", question(&LaunchControl::is_over))
      .def("order_of_need", question(&LaunchControl::order_of_need))
      .def("next_phase",
           [](const LentControl& control, size_t bucket) -> std::optional<std::string> {
             const std::optional<Phase> phase = control.about(bucket).next_phase(bucket);
             return phase ? std::optional(name_of(*phase)) : std::nullopt;
           })
      .def("launch", launch_one, py::arg("bucket"), py::arg("priority") = 0,
           py::arg("background") = true, py::arg("algorithm") = py::none(),
           py::arg("slice") = py::none())
      .def("launch", launch, py::arg("bucket"), py::arg("priority") = 0,
           py::arg("background") = true, py::arg("algorithm") = py::none())
      .def("skip", call(&LaunchControl::skip))
      .def("wait", call(&LaunchControl::wait))
      .def("update", [](LentControl& control, size_t bucket) { update(control, {bucket}); })
      .def("update", update)
      .def("wait_for_all", [](LentControl& control) {
        const py::gil_scoped_release no_gil;
        control.get().wait_for_all();
      });
}

}  // namespace dpcore
