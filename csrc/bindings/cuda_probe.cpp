// `_C.cuda_probe()`: what of CUDA is there, as a dict that `dpcore doctor` can print. Present in
// every build, so that the answer on a machine without CUDA is a sentence and not an
// AttributeError.
#include <pybind11/pybind11.h>

#include "cuda/device/probe.h"

namespace py = pybind11;

namespace dpcore {
#ifndef DPCORE_WITH_CUDA
CudaProbe probe_cuda(int) {
  CudaProbe probe;
  probe.problem =
      "built without CUDA: nvcc was not found at build time (or DPCORE_CUDA=0 was set): put it in "
      "PATH or set CUDA_HOME, and build again";
  return probe;
}
#endif

namespace {

py::dict cuda_probe() {
  CudaProbe probe;
  {
    py::gil_scoped_release release;  // creating a context takes a second
    probe = probe_cuda();
  }
  py::dict result;
#ifdef DPCORE_WITH_CUDA
  result["built"] = true;
#else
  result["built"] = false;
#endif
  result["runtime_version"] = probe.runtime_version;
  result["driver_version"] = probe.driver_version;
  result["devices"] = probe.devices;
  result["problem"] = probe.problem;
  return result;
}

}  // namespace

void register_cuda_probe(py::module_& m) {
  m.def("cuda_probe", &cuda_probe,
        "What of CUDA works here, found by running a kernel on every device.\n\n"
        "A dict: built, runtime_version, driver_version (13000 is 13.0, 0 is none), devices, and "
        "problem, which is empty when all is well and says what to do when it is not.");
}

}  // namespace dpcore
