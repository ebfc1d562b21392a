// dpcore._C.LaunchSchedule, to be subclassed in Python, and LaunchControl, which its methods get.
//
// A method that the subclass does not define is not listened to, so a schedule written in Python
// takes the GIL only for the events that it wants.
#include "reducer/launch_schedule.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>

namespace py = pybind11;

namespace dpcore {
namespace {

constexpr std::array<std::pair<const char*, LaunchSchedule::Event>, 5> kEvents = {{
    {"gradient_ready", LaunchSchedule::gradient_ready},
    {"bucket_ready", LaunchSchedule::bucket_ready},
    {"backward_end", LaunchSchedule::backward_end},
    {"forward_begin", LaunchSchedule::forward_begin},
    {"optimizer_step", LaunchSchedule::optimizer_step},
}};

class PyLaunchSchedule final : public LaunchSchedule {
 public:
  std::string name() const override {
    const py::gil_scoped_acquire gil;
    return py::type::of(self()).attr("__name__").cast<std::string>();
  }
  bool is_exact() const override {
    const py::gil_scoped_acquire gil;
    const py::function method = override_of("is_exact");
    return !method || method().cast<bool>();
  }
  std::vector<uint64_t> caps(std::vector<uint64_t> wanted) const override {
    const py::gil_scoped_acquire gil;
    const py::function method = override_of("caps");
    return method ? method(wanted).cast<std::vector<uint64_t>>() : wanted;
  }
  std::vector<size_t> order(size_t buckets) const override {
    const py::gil_scoped_acquire gil;
    const py::function method = override_of("order");
    return method ? method(buckets).cast<std::vector<size_t>>() : LaunchSchedule::order(buckets);
  }
  uint32_t listens() const override {
    const py::gil_scoped_acquire gil;
    uint32_t events = 0;
    for (const auto& [method, event] : kEvents) {
      events |= override_of(method) ? static_cast<uint32_t>(event) : 0;
    }
    return events;
  }

  void on_gradient_ready(LaunchControl& control, size_t gradient) override {
    call("gradient_ready", control, gradient);
  }
  void on_bucket_ready(LaunchControl& control, size_t bucket) override {
    call("bucket_ready", control, bucket);
  }
  void on_backward_end(LaunchControl& control) override { call("backward_end", control); }
  void on_forward_begin(LaunchControl& control, size_t module) override {
    call("forward_begin", control, module);
  }
  void on_optimizer_step(LaunchControl& control) override { call("optimizer_step", control); }

 private:
  py::function override_of(const char* method) const {
    return py::get_override(static_cast<const LaunchSchedule*>(this), method);
  }
  py::object self() const { return py::cast(static_cast<const LaunchSchedule*>(this)); }

  template <class... Arguments>
  void call(const char* method, LaunchControl& control, Arguments... arguments) const {
    const py::gil_scoped_acquire gil;
    override_of(method)(py::cast(&control, py::return_value_policy::reference), arguments...);
  }
};

}  // namespace

void register_launch_schedule(py::module_& m) {
  py::class_<LaunchControl, std::unique_ptr<LaunchControl, py::nodelete>>(m, "LaunchControl")
      .def_property_readonly("buckets", &LaunchControl::buckets)
      .def("bucket_of",
           [](const LaunchControl& control, size_t gradient) -> std::optional<size_t> {
             const size_t bucket = control.bucket_of(gradient);
             return bucket == LaunchControl::kNoBucket ? std::nullopt : std::optional(bucket);
           })
      .def("gradients_of_module", &LaunchControl::gradients_of_module)
      .def("is_complete", &LaunchControl::is_complete)
      .def(
          "launch",
          [](LaunchControl& control, size_t bucket, int priority, bool background) {
            const py::gil_scoped_release no_gil;
            control.launch(bucket, {priority, background});
          },
          py::arg("bucket"), py::arg("priority") = 0, py::arg("background") = true)
      .def("skip", &LaunchControl::skip, py::call_guard<py::gil_scoped_release>())
      .def("wait", &LaunchControl::wait, py::call_guard<py::gil_scoped_release>())
      .def("wait_for_all", &LaunchControl::wait_for_all, py::call_guard<py::gil_scoped_release>());
  py::class_<LaunchSchedule, PyLaunchSchedule, std::shared_ptr<LaunchSchedule>>(
      m, "LaunchSchedule",
      "When buckets are sent, and who waits where. Subclass it and pass it to DataParallel.")
      .def(py::init<>())
      .def_property_readonly("name", &LaunchSchedule::name);
  m.def("make_launch_schedule", make_launch_schedule);
  m.def("launch_schedule_names", launch_schedule_names);
}

}  // namespace dpcore
