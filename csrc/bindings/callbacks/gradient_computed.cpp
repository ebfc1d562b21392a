// torch.ops.dpcore.gradient_computed: what a compiled backward calls when it has computed a
// gradient (dpcore/ddp/compiled/operations.py puts it there).
//
// It returns nothing, so that the compiler may not reuse or copy the gradient for it, and takes any
// strides. In a CUDA graph it would run once and never again: the graph is divided there.
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <optional>

#include "reducer/backward/autograd_hooks.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// Autograd's hooks, one of which this stands for, run without the GIL.
void gradient_computed(const at::Tensor& gradient, int64_t output) {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check() != 0) {
    no_gil.emplace();
  }
  hear_computed(gradient, output);
}

void does_nothing(const at::Tensor&, int64_t) {}

}  // namespace
}  // namespace dpcore

TORCH_LIBRARY_FRAGMENT(dpcore, m) {
  m.def("gradient_computed(Tensor gradient, int output) -> ()",
        {at::Tag::cudagraph_unsafe, at::Tag::flexible_layout});
  m.impl("gradient_computed",
         torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &dpcore::gradient_computed));
  m.impl("gradient_computed", torch::dispatch(c10::DispatchKey::Meta, &dpcore::does_nothing));
}
