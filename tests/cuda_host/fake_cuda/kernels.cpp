// Kernels: what nvcc's code registers and launches, run as the same functions on the host, every
// thread of every block in turn.
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <typeinfo>

#include "cuda/kernels/part_copy.h"
#include "cuda/kernels/reduce_table.h"
#include "cuda/kernels/share_sync.h"
#include "fake_cuda.h"

namespace fake_cuda {
namespace {

constexpr size_t kMostArgumentBytes = 32764;  // from CUDA 12.1 on

struct Launch {
  dim3 grid;
  dim3 block;
};
// Copies the arguments and gives the work.
using Kernel = std::function<void()> (*)(const Launch& launch, void** arguments);

std::string readable(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : mangled;
  std::free(text);
  return result;
}

template <class Reducer>
void reduce_block(const dpcore::ReduceShares& job, unsigned block, const Launch& launch) {
  for (unsigned thread = 0; thread < launch.block.x; ++thread) {
    Reducer::run(job, size_t{block} * launch.block.x + thread,
                 size_t{launch.grid.x} * launch.block.x);
  }
}

// run_share() with the barriers of a block that has one thread at a time.
template <class Reducer, class Policy>
std::function<void()> reduction(const Launch& launch, void** arguments) {
  const auto job = *static_cast<const dpcore::ReduceShares*>(arguments[0]);
  const auto sync = *static_cast<const dpcore::ShareSync*>(arguments[1]);
  return [=] {
    for (unsigned b = 0; b < launch.grid.x; ++b) {
      dpcore::element::LoneBlock block(static_cast<int>(b), static_cast<int>(launch.grid.x));
      if (!Policy::enter(sync, block)) {
        continue;
      }
      reduce_block<Reducer>(job, b, launch);
      Policy::leave(sync, block);
    }
  };
}

std::function<void()> copy(const Launch& launch, void** arguments) {
  const auto list =
      std::make_shared<const dpcore::PartList>(*static_cast<const dpcore::PartList*>(arguments[0]));
  return [=] {
    for (unsigned block = 0; block < launch.grid.x; ++block) {
      for (unsigned thread = 0; thread < launch.block.x; ++thread) {
        dpcore::element::copy_block(*list, block, thread, launch.block.x);
      }
    }
  };
}

// The smallest kernel there is: csrc/cuda/device/probe.cu.
std::function<void()> write_answer(const Launch&, void** arguments) {
  int* out = *static_cast<int**>(arguments[0]);
  return [out] { *out = 42; };
}

// By what stands between the angle brackets of reduce_kernel<...>.
std::map<std::string, Kernel>& reductions() {
  static auto* it = new std::map<std::string, Kernel>;
  return *it;
}

template <class Policy>
struct Named {
  template <class Reducer>
  static int make() {
    const std::string key =
        readable(typeid(Reducer).name()) + ", " + readable(typeid(Policy).name());
    reductions()[key] = &reduction<Reducer, Policy>;
    return 0;
  }
};

struct Registered {
  Kernel kernel = nullptr;
  size_t arguments = 0;  // bytes
};

Registered found(const std::string& name) {
  using namespace dpcore;
  static const ReduceTable<int, Named<element::StreamOrder>> ordered;
  static const ReduceTable<int, Named<element::InKernelBarrier>> barrier;
  const size_t opens = name.find("reduce_kernel<");
  if (opens != std::string::npos) {
    const size_t begin = opens + std::strlen("reduce_kernel<");
    const auto kernel = reductions().find(name.substr(begin, name.rfind(">(") - begin));
    if (kernel != reductions().end()) {
      return {kernel->second, sizeof(ReduceShares) + sizeof(ShareSync)};
    }
  }
  if (name.find("copy_kernel(") != std::string::npos) {
    return {&copy, sizeof(PartList)};
  }
  if (name.find("write_answer(") != std::string::npos) {
    return {&write_answer, sizeof(int*)};
  }
  misuse("a kernel that this stand-in does not know: " + name);
}

struct Kernels {
  std::mutex mutex;
  std::map<const void*, Registered> by_address;
};
Kernels& kernels() {
  static auto* it = new Kernels;
  return *it;
}

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};
thread_local Configuration t_configuration;

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* address, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const Registered kernel = found(readable(name));
  const std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().by_address[address] = kernel;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  t_configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = t_configuration.grid;
  *block = t_configuration.block;
  *shared = t_configuration.shared;
  *static_cast<cudaStream_t*>(stream) = t_configuration.stream;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* address) {
  FAKE_RUNTIME_CALL("cudaFuncGetAttributes");
  const std::lock_guard<std::mutex> lock(kernels().mutex);
  const bool is_known = kernels().by_address.contains(address);
  return answer(is_known ? cudaSuccess : cudaErrorInvalidDeviceFunction);
}

// A handle is the address.
cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* address) {
  *handle = reinterpret_cast<cudaKernel_t>(const_cast<void*>(address));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void** arguments, size_t,
                               cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(handle), grid, block, arguments, 0, stream);
}
cudaError_t cudaLaunchKernel(const void* address, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  FAKE_RUNTIME_CALL("<<<>>>");
  if (grid.x == 0 || block.x == 0 || block.x > 1024 || grid.y != 1 || grid.z != 1 || shared != 0) {
    return answer(cudaErrorInvalidConfiguration);
  }
  if (!is_ours(stream)) {
    return answer(cudaErrorInvalidResourceHandle);
  }
  Registered kernel;
  {
    const std::lock_guard<std::mutex> lock(kernels().mutex);
    const auto known = kernels().by_address.find(address);
    if (known == kernels().by_address.end()) {
      return answer(cudaErrorInvalidDeviceFunction);
    }
    kernel = known->second;
  }
  if (kernel.arguments > kMostArgumentBytes) {
    return answer(cudaErrorInvalidValue);
  }
  enqueue(stream, kernel.kernel({grid, block}, arguments));
  return cudaSuccess;
}

}  // extern "C"
