// `_C.WarmMemory`: torch's large blocks on the CPU come from a pool while one of these is open, and
// what the pool has.
#include "tensors/warm_memory.h"

#include <pybind11/pybind11.h>

#include <memory>

namespace py = pybind11;

namespace dpcore {
namespace {

// Closing it twice is allowed.
class OpenWarmMemory {
 public:
  void close() { memory_.reset(); }

 private:
  std::unique_ptr<WarmMemory> memory_ = std::make_unique<WarmMemory>(WarmMemory::For::all);
};

py::dict warm_memory_figures() {
  const WarmPool* pool = warm_pool();
  const WarmPool::Figures figures = pool == nullptr ? WarmPool::Figures{} : pool->figures();
  py::dict out;
  out["is_on"] = is_memory_warm();
  out["used"] = figures.used;
  out["kept"] = figures.kept;
  out["most"] = figures.most;
  out["warm"] = figures.warm;
  out["mapped"] = figures.mapped;
  return out;
}

}  // namespace

void register_warm_memory(py::module_& m) {
  py::class_<OpenWarmMemory>(m, "WarmMemory")
      .def(py::init<>())
      .def("close", &OpenWarmMemory::close);
  m.def("warm_memory_figures", warm_memory_figures);
  // The clock does it in a program.
  m.def("end_warm_window", [] {
    if (WarmPool* pool = warm_pool()) {
      pool->end_window();
    }
  });
}

}  // namespace dpcore
