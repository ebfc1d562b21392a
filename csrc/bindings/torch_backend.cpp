// Makes the backend of torch.distributed over a communicator, and shows the flight log.
#include "torch_backend/backend.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/py_work.h"
#include "torch_backend/flight_log.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// torch copies the options of a group that it splits.
struct CopiedOptions : c10d::Backend::Options {
  using Options::Options;
};

c10::intrusive_ptr<TorchBackend> make_backend(
    const std::shared_ptr<PyCommunicator>& communicator,
    const c10::intrusive_ptr<c10d::Store>& store, double timeout, const std::string& name,
    const std::vector<uint64_t>& global_ranks, const std::string& cuda,
    const std::string& algorithm, bool deterministic, const std::vector<std::string>& libraries,
    const std::optional<std::string>& host_uuid, const std::string& refusal) {
  auto options = c10::make_intrusive<CopiedOptions>(
      "dpcore", std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3)));
  options->group_name = name;
  options->global_ranks_in_group = global_ranks;
  return c10::make_intrusive<TorchBackend>(
      communicator->core, store, std::move(options), check_signals,
      DeviceSide::Settings{cuda, algorithm, deterministic, libraries, host_uuid, refusal});
}

// By device, what carries its operations: those that there are.
py::dict device_libraries(const TorchBackend& backend) {
  py::dict list;
  for (const auto& group : backend.devices().all()) {
    const StreamCommunicator& core = group->communicator();
    list[py::str(group->device().str())] = py::make_tuple(core.backend(), core.describe());
  }
  return list;
}

py::list shapes_of(const FlightLog::Shapes& shapes) {
  py::list list;
  for (size_t i = 0; i < shapes.sizes.size(); ++i) {
    list.append(py::make_tuple(shapes.sizes[i], shapes.types[i]));
  }
  return list;
}

py::list flight_entries() {
  py::list list;
  for (const FlightLog::Entry& entry : FlightLog::of_process().entries()) {
    py::dict row;
    row["id"] = entry.id;
    row["collective_id"] = entry.collective_id;
    row["ranks"] = *entry.ranks;
    row["group"] = entry.group;
    row["description"] = entry.description;
    row["collective"] = entry.collective;
    row["message"] = entry.message;
    row["operation"] = entry.operation;
    row["name"] = entry.name;
    row["inputs"] = shapes_of(entry.inputs);
    row["outputs"] = shapes_of(entry.outputs);
    row["created_ns"] = entry.created_ns;
    row["completed_ns"] = entry.completed_ns;
    row["failed"] = entry.failed;
    row["timeout_ms"] = entry.timeout_ms;
    row["is_message"] = entry.is_message;
    list.append(row);
  }
  return list;
}

}  // namespace

void register_torch_backend(py::module_& m) {
  py::class_<CopiedOptions, c10::intrusive_ptr<CopiedOptions>, c10d::Backend::Options>(
      m, "TorchBackendOptions")
      .def("__deepcopy__", [](const CopiedOptions& options, const py::dict&) {
        return c10::make_intrusive<CopiedOptions>(options);
      });
  // A class of its own for what torch asks backends for GPUs in Python.
  py::class_<TorchBackend, c10::intrusive_ptr<TorchBackend>, c10d::Backend>(m, "TorchBackend")
      // Of ranks that are in no part of a split: ours meet through the store, without the others.
      .def("perform_nocolor_split", [](TorchBackend&, const py::object&) {})
      .def_property_readonly("options",
                             [](TorchBackend& backend) { return backend.getBackendOptions(); })
      .def("device_libraries", device_libraries);
  m.def("make_torch_backend", make_backend, py::arg("communicator"), py::arg("store"),
        py::arg("timeout"), py::arg("name"), py::arg("global_ranks"), py::arg("cuda") = "auto",
        py::arg("algorithm") = "auto", py::arg("deterministic") = false,
        py::arg("libraries") = std::vector<std::string>{}, py::arg("host_uuid") = py::none(),
        py::arg("refusal") = "");
  m.def("flight_entries", flight_entries);
}

}  // namespace dpcore
