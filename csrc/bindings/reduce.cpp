// The kernels, bare, for tests and benchmarks: memory is given by address.
#include "comm/reduce.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/error.h"
#include "comm/types.h"

namespace dpcore {
namespace {

namespace py = pybind11;

void reduce_arrays(const std::string& dtype, const std::string& op,
                   const std::vector<uintptr_t>& inputs, const std::vector<uintptr_t>& outputs,
                   size_t count, double post, const std::optional<std::vector<double>>& pre,
                   bool streaming) {
  if (pre && pre->size() != inputs.size()) {
    throw Unsupported(std::to_string(pre->size()) + " factors for " +
                      std::to_string(inputs.size()) + " inputs: give one per input");
  }
  std::vector<const void*> in;
  for (uintptr_t address : inputs) in.push_back(reinterpret_cast<const void*>(address));
  std::vector<void*> out;
  for (uintptr_t address : outputs) out.push_back(reinterpret_cast<void*>(address));
  const ReduceSpec spec{.dtype = parse_dtype(dtype),
                        .op = parse_reduce_op(op),
                        .post = post,
                        .pre = pre ? pre->data() : nullptr,
                        .streaming = streaming};
  reduce(spec, in, out, count);
}

void copy_addresses(uintptr_t dst, uintptr_t src, size_t n, bool streaming) {
  copy_bytes(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), n, streaming);
}

}  // namespace

void register_reduce(py::module_& m) {
  using py::arg;
  const py::call_guard<py::gil_scoped_release> without_gil;
  m.def("_reduce", &reduce_arrays, arg("dtype"), arg("op"), arg("inputs"), arg("outputs"),
        arg("count"), arg("post") = 1.0, arg("pre") = py::none(), arg("streaming") = false,
        without_gil, "Reduces `count` elements at the addresses `inputs` into `outputs`.");
  m.def("_copy_bytes", &copy_addresses, arg("dst"), arg("src"), arg("n"), arg("streaming") = false,
        without_gil, "Copies n bytes between two addresses.");
  m.def("simd_level", &simd_level,
        "The instruction set of the reduction kernels: avx512, avx2 or portable.");
}

}  // namespace dpcore
