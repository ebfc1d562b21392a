// Probes which parts of CUDA this machine has. To be called before any other call into CUDA; the
// result explains to a user why a GPU is not available.
//
// No CUDA header is included here, so that files compiled without nvcc can read it.
#pragma once

#include <string>

namespace dpcore {

struct CudaProbe {
  int runtime_version = 0;  // of the runtime linked into this module; 13000 means 13.0
  int driver_version = 0;   // the newest CUDA that the installed driver can run; 0 without a driver
  int devices = 0;
  std::string problem;  // empty when a kernel ran; otherwise what is missing and what to do
};

// Runs a kernel of one thread on every visible device, or on one, and reads its answer back: a
// device that is counted can still lack code for its architecture. Never throws. Leaves a context
// on each device that it has tried, so ask in processes that are going to use it or that end soon.
CudaProbe probe_cuda(int only = -1);

}  // namespace dpcore
