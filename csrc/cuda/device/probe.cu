// Tries the parts of CUDA in the order in which they can be missing: a driver, one new enough for
// our runtime, a device, code for that device.
#include <cuda_runtime.h>

#include "cuda/device/probe.h"
#include "cuda/kernels/driver.cuh"

namespace dpcore {
namespace {

constexpr int kAnswer = 42;

__global__ void write_answer(int* out) { *out = kAnswer; }

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string described(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
}

// One kernel on the current device, its result read back.
cudaError_t run_kernel(int* answer) {
  int* memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, sizeof(int));
  if (error != cudaSuccess) {
    return error;
  }
  write_answer<<<1, 1>>>(memory);
  // A missing code image is reported by the launch, everything else by the copy, which also waits.
  error = cudaGetLastError();
  if (error == cudaSuccess) {
    error = cudaMemcpy(answer, memory, sizeof(int), cudaMemcpyDeviceToHost);
  }
  if (cudaFree(memory) != cudaSuccess) {
    cudaGetLastError();
  }
  return error;
}

std::string problem_of_device(int device) {
  const std::string name = "CUDA device " + std::to_string(device);
  int answer = 0;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    error = run_kernel(&answer);
  }
  if (error == cudaErrorNoKernelImageForDevice) {
    int major = 0;
    int minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const std::string arch = std::to_string(major) + std::to_string(minor);
    return name + " needs code for sm_" + arch +
           ", which this build does not contain: build again " + "with DPCORE_CUDA_ARCHS=" + arch;
  }
  if (error != cudaSuccess) {
    return name + " does not run a kernel: " + described(error);
  }
  if (answer != kAnswer) {
    return name + " ran a kernel and returned a wrong result";
  }
  return "";
}

}  // namespace

CudaProbe probe_cuda(int only) {
  CudaProbe probe;
  cudaRuntimeGetVersion(&probe.runtime_version);
  // Answers 0, without an error, where there is no driver.
  cudaDriverGetVersion(&probe.driver_version);
  if (probe.driver_version == 0) {
    probe.problem =
        "no NVIDIA driver on this machine (libcuda.so.1 was not found): install the driver, or in "
        "a container start it with the GPUs passed through";
    return probe;
  }
  cudaError_t error = cudaGetDeviceCount(&probe.devices);
  if (error == cudaErrorInsufficientDriver) {
    probe.problem = "the NVIDIA driver runs CUDA " + version_text(probe.driver_version) +
                    " and this build needs " + version_text(probe.runtime_version) +
                    ": install a newer driver, or build with an older toolkit";
  } else if (error == cudaErrorNoDevice || (error == cudaSuccess && probe.devices == 0)) {
    probe.devices = 0;
    probe.problem =
        "the NVIDIA driver is installed but shows no GPU: look at CUDA_VISIBLE_DEVICES and at "
        "what nvidia-smi says";
  } else if (error != cudaSuccess) {
    probe.problem = "the GPUs cannot be counted: " + described(error);
  }
  if (!probe.problem.empty()) {
    cudaGetLastError();  // clears the error for the calls of CUDA after ours
    return probe;
  }
  CUcontext before = nullptr;
  const Driver* driver = nullptr;
  try {
    driver = &Driver::get();
    driver->current_context(&before);  // none where CUDA has not been called yet
  } catch (const Error& error) {
    probe.problem = error.what();
  }
  for (int device = 0; device < probe.devices && probe.problem.empty(); ++device) {
    if (only < 0 || device == only) {
      probe.problem = problem_of_device(device);
    }
  }
  if (driver != nullptr) {
    driver->make_context_current(before);
  }
  cudaGetLastError();  // what failed is in `problem`
  return probe;
}

}  // namespace dpcore
