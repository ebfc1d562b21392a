// The machine: devices, what is current for a thread, errors, and what tests ask for.
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

struct Machine {
  std::mutex mutex;
  int devices = 1;
  bool descriptors = true;
  bool ipc = true;
  std::map<std::string, uint64_t> calls;
  std::map<std::string, int> failures;
  int key = -1;  // of the processor's protection, where there is one
};

void tell_who_touched(int, siginfo_t* info, void*) {
  constexpr int kByKey = 4;  // SEGV_PKUERR
  if (info->si_code == kByKey) {
    const char text[] = "fake CUDA: a thread of the host touched memory of a device\n";
    (void)!::write(STDERR_FILENO, text, sizeof(text) - 1);
  }
  signal(SIGSEGV, SIG_DFL);
  raise(SIGSEGV);
}

// Never destroyed: streams may still run when the process ends.
Machine& machine() {
  static Machine* it = [] {
    auto* made = new Machine;
    made->key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    if (made->key >= 0) {
      struct sigaction action{};
      action.sa_sigaction = tell_who_touched;
      action.sa_flags = SA_SIGINFO;
      sigaction(SIGSEGV, &action, nullptr);
    }
    return made;
  }();
  return *it;
}

thread_local int t_device = -1;
thread_local cudaError_t t_error = cudaSuccess;

}  // namespace

void have_devices(int count) { machine().devices = count; }
void allow(bool descriptors, bool ipc) {
  machine().descriptors = descriptors;
  machine().ipc = ipc;
}
void fail_next(const std::string& call, int error) {
  const std::lock_guard<std::mutex> lock(machine().mutex);
  machine().failures[call] = error;
}
std::map<std::string, uint64_t> calls() {
  const std::lock_guard<std::mutex> lock(machine().mutex);
  return machine().calls;
}
bool has_error() { return t_error != cudaSuccess; }
bool has_context() { return t_device >= 0; }
std::string left_behind() { return streams_left() + memory_left() + physical_left(); }
bool is_guarded() { return machine().key >= 0; }

void misuse(const std::string& what) {
  std::fprintf(stderr, "fake CUDA: %s\n", what.c_str());
  std::abort();
}

int begin_call(const char* name) {
  const std::lock_guard<std::mutex> lock(machine().mutex);
  ++machine().calls[name];
  const auto wanted = machine().failures.find(name);
  if (wanted == machine().failures.end()) {
    return 0;
  }
  const int error = wanted->second;
  machine().failures.erase(wanted);
  return error;
}

int device_count() { return machine().devices; }
bool descriptors_allowed() { return machine().descriptors; }
bool ipc_allowed() { return machine().ipc; }

int current_device() { return t_device; }
int current_device_or_first() {
  if (t_device < 0) {
    t_device = 0;
  }
  return t_device;
}
void make_current(int device) { t_device = device; }
void needs_context(const char* call) {
  if (t_device < 0) {
    misuse(std::string(call) + " by a thread without a context");
  }
}

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) {
    t_error = error;
  }
  return error;
}

void let_streams_touch(std::byte* memory, size_t bytes) {
  constexpr int kRights = PROT_READ | PROT_WRITE;
  const int failed = is_guarded() ? pkey_mprotect(memory, bytes, kRights, machine().key)
                                  : mprotect(memory, bytes, kRights);
  if (failed != 0) {
    misuse("mprotect: " + std::string(std::strerror(errno)));
  }
}

// Threads begin without the right to touch what has a key.
void let_this_thread_touch_devices() {
  if (is_guarded()) {
    pkey_set(machine().key, 0);
  }
}

}  // namespace fake_cuda

using namespace fake_cuda;

// ---- devices of the runtime
// ----------------------------------------------------------------------

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t error = t_error;
  t_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    default:
      return "another cudaError";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = device_count() > 0 ? CUDART_VERSION : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  FAKE_RUNTIME_CALL("cudaGetDeviceCount");
  *count = device_count();
  return answer(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device_or_first();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  FAKE_RUNTIME_CALL("cudaSetDevice");
  if (device < 0 || device >= device_count()) {
    return answer(cudaErrorInvalidDevice);
  }
  make_current(device);
  return cudaSuccess;
}
// The header gives the name of the second version to it.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  FAKE_RUNTIME_CALL("cudaGetDeviceProperties");
  if (device < 0 || device >= device_count()) {
    return answer(cudaErrorInvalidDevice);
  }
  std::memset(properties, 0, sizeof(*properties));
  std::memset(properties->uuid.bytes, 0x10 + device, sizeof(properties->uuid.bytes));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= device_count()) {
    return answer(cudaErrorInvalidDevice);
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 6;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    default:
      return answer(cudaErrorInvalidValue);
  }
}
cudaError_t cudaDeviceSynchronize() {
  FAKE_RUNTIME_CALL("cudaDeviceSynchronize");
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  wait_for_device(current_device_or_first());
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  FAKE_RUNTIME_CALL("cudaDeviceEnablePeerAccess");
  static std::mutex mutex;
  static bool enabled[kMostDevices][kMostDevices] = {};
  const int device = current_device_or_first();
  if (peer == device || peer < 0 || peer >= device_count()) {
    return answer(cudaErrorInvalidDevice);
  }
  if (flags != 0) {
    return answer(cudaErrorInvalidValue);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (enabled[device][peer]) {
    return answer(cudaErrorPeerAccessAlreadyEnabled);
  }
  enabled[device][peer] = true;
  return cudaSuccess;
}

}  // extern "C"
