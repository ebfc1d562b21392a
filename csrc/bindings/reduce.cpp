// The kernels, bare, for tests and benchmarks: memory is given by address.
#include "comm/reduce/reduce.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/base/error.h"
#include "comm/base/types.h"
#include "cuda/device/device.h"
#include "cuda/kernels/part_copy.h"
#include "cuda/kernels/reduce_job.h"

namespace dpcore {
namespace {

namespace py = pybind11;

// Rank, element and ranks of a NotFinite.
using Found = std::tuple<int, uint64_t, uint64_t>;

// `workers`: 0 for the kernels of processors, else the functions of GPU kernels, by so many.
// `device_name`: a GPU ("cuda:0") that does it, with addresses of its memory. `looks`: for NaN and
// Inf; what was found is returned.
std::optional<Found> reduce_arrays(const std::string& dtype, const std::string& op,
                                   const std::vector<uintptr_t>& inputs,
                                   const std::vector<uintptr_t>& outputs, size_t count, double post,
                                   const std::optional<std::vector<double>>& pre, bool takes_over,
                                   size_t workers, const std::string& device_name, uint32_t divisor,
                                   bool looks) {
  if (pre && pre->size() != inputs.size()) {
    throw Unsupported(std::to_string(pre->size()) + " factors for " +
                      std::to_string(inputs.size()) + " inputs: give one per input");
  }
  std::vector<const void*> in;
  for (uintptr_t address : inputs) {
    in.push_back(reinterpret_cast<const void*>(address));
  }
  std::vector<void*> out;
  for (uintptr_t address : outputs) {
    out.push_back(reinterpret_cast<void*>(address));
  }
  NotFinite found;
  const ReduceSpec spec{.dtype = parse_dtype(dtype),
                        .op = parse_reduce_op(op),
                        .post = post,
                        .divisor = divisor,
                        .pre = pre ? pre->data() : nullptr,
                        .takes_over = takes_over,
                        .check = {.found = looks ? &found : nullptr}};
  if (!device_name.empty()) {
    const auto device = device_named(device_name);
    const DeviceGuard here(*device);
    device->reduce(nullptr, spec, in, out, count);
    device->synchronize(nullptr);
  } else if (workers == 0) {
    reduce(spec, in, out, count);
  } else {
    run_on_host(reduce_job(spec, in, out, count), workers);
  }
  return found.is_found() ? std::optional(Found(found.rank, found.element, found.ranks))
                          : std::nullopt;
}

// (address, offset in the flat buffer in bytes, elements)
using Part = std::tuple<uintptr_t, uint64_t, uint64_t>;

size_t copy_parts(const std::vector<Part>& parts, const std::string& part_type, uintptr_t flat,
                  const std::string& flat_type, bool to_flat, double factor, size_t workers,
                  const std::string& device_name) {
  std::vector<FlatPart> list;
  for (const auto& [address, offset, elements] : parts) {
    list.push_back({reinterpret_cast<void*>(address), offset, elements});
  }
  std::vector<PartList> launches;
  fill_part_lists(launches, list, parse_dtype(part_type), reinterpret_cast<void*>(flat),
                  parse_dtype(flat_type), to_flat, factor);
  const auto device = device_name.empty() ? nullptr : device_named(device_name);
  if (!device) {
    for (const PartList& launch : launches) {
      copy_on_host(launch, workers);
    }
    return launches.size();
  }
  const DeviceGuard here(*device);
  for (const PartList& launch : launches) {
    device->copy_parts(nullptr, launch);
  }
  device->synchronize(nullptr);
  return launches.size();
}

void copy_addresses(uintptr_t dst, uintptr_t src, size_t n, const std::string& way) {
  const std::map<std::string, void (*)(void*, const void*, size_t)> ways = {
      {"", copy_bytes},
      {"to peers", copy_to_peers},
      {"from a peer", copy_from_peer},
      {"taking over", copy_taking_over}};
  ways.at(way)(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), n);
}

}  // namespace

void register_reduce(py::module_& m) {
  using py::arg;
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("_reduce", &reduce_arrays, arg("dtype"), arg("op"), arg("inputs"), arg("outputs"),
        arg("count"), arg("post") = 1.0, arg("pre") = py::none(), arg("takes_over") = false,
        arg("workers") = 0, arg("device") = "", arg("divisor") = 1, arg("looks") = false,
        without_gil, "Reduces `count` elements at the addresses `inputs` into `outputs`.");
  m.def("_copy_bytes", &copy_addresses, arg("dst"), arg("src"), arg("n"), arg("way") = "",
        without_gil, "Copies n bytes between two addresses.");
  m.def("_copy_parts", &copy_parts, arg("parts"), arg("part_type"), arg("flat"), arg("flat_type"),
        arg("to_flat"), arg("factor") = 1.0, arg("workers") = 1, arg("device") = "", without_gil,
        "Copies tensors into flat memory or back; the number of launches it would take.");
  m.def("simd_level", &simd_level,
        "The instruction set of the reduction kernels: avx512, avx2 or portable.");
}

}  // namespace dpcore
