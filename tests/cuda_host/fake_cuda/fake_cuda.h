// A stand-in for the CUDA runtime and driver, linked instead of libcudart_static: what is compiled
// for a GPU (csrc/cuda/*/*.cu) runs as it is, on devices made of the host's memory and threads.
//
//   streams   threads that do their work later (HostStream); kernels are the same functions as host
//             code, found by the names that nvcc's registration gives
//   memory    memfds; behind descriptors and ipc handles other processes map the same pages. Where
//             the processor has protection keys only streams may touch it: a thread of the host
//             that does is told so and ends
//   rules     as CUDA documents them: what is current, which device a stream belongs to, what may
//   be
//             called while a graph is captured, what is whose. Breaking one is the documented
//             error, or the end of the process where CUDA promises nothing
//
// Tests steer it by what stands here. Threads: any. One lock for all tables; none while work runs.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace fake_cuda {

// ---- for tests
// -----------------------------------------------------------------------------------

// Before anything else is called. Their UUIDs are the same in every process.
void have_devices(int count);
// Processes may share a device by descriptors, by ipc; both true at first.
void allow(bool descriptors, bool ipc);
// The next call of this name answers so, once.
void fail_next(const std::string& call, int error);
// What was called how often so far, kernels by "<<<>>>".
std::map<std::string, uint64_t> calls();
// Everything that nobody has given back, a line each; empty at best.
std::string left_behind();
// The calling thread holds an error that nobody has fetched, or has a current device.
bool has_error();
bool has_context();
// Host memory to a device and back, by a stream of its own: what a program does with cudaMemcpy.
void write(void* to, const void* from, size_t bytes);
void read(void* to, const void* from, size_t bytes);
// Whether memory of devices is kept from threads of the host.
bool is_guarded();

// ---- for the parts of it
// -------------------------------------------------------------------------

inline constexpr int kMostDevices = 8;
inline constexpr size_t kGranularity = size_t{2} << 20;

// CUDA promises nothing where it comes to this.
[[noreturn]] void misuse(const std::string& what);

// Counts the call, and says what the test wants it to answer, or 0.
int begin_call(const char* name);

int device_count();
bool descriptors_allowed();
bool ipc_allowed();

// -1: none. The runtime takes the first device where a thread has chosen none; the driver does not.
int current_device();
int current_device_or_first();
// For what ends things, perhaps on a thread that never chose a device: CUDA would make a context of
// the first one, which takes hundreds of megabytes there.
void needs_context(const char* call);
void make_current(int device);

// Fetched by cudaGetLastError.
cudaError_t answer(cudaError_t error);

// Work into a stream, or into the graph that it is captured into; null: the device's own stream.
// `is_ours`: whether the stream is of the current device.
bool is_ours(cudaStream_t stream);
void enqueue(cudaStream_t stream, std::function<void()> work);
bool is_captured(cudaStream_t stream);
void wait_for_stream(cudaStream_t stream);
void wait_for_device(int device);  // all streams of this process

// False, and the capture is invalid, where a graph is being captured that this call would disturb.
bool may_disturb();

// Memory of a device: from a memfd, shared with whoever else maps it.
std::byte* map_device_memory(int descriptor, size_t bytes, std::byte* at = nullptr);
int make_device_memory(size_t bytes);
void let_streams_touch(std::byte* memory, size_t bytes);
void let_this_thread_touch_devices();

std::string memory_left();
std::string physical_left();
std::string streams_left();

}  // namespace fake_cuda

// The beginning of each call of the runtime.
#define FAKE_RUNTIME_CALL(name)                                   \
  do {                                                            \
    const int wanted = fake_cuda::begin_call(name);               \
    if (wanted != 0)                                              \
      return fake_cuda::answer(static_cast<cudaError_t>(wanted)); \
  } while (false)
#define FAKE_DRIVER_CALL(name)                      \
  do {                                              \
    const int wanted = fake_cuda::begin_call(name); \
    if (wanted != 0)                                \
      return static_cast<CUresult>(wanted);         \
  } while (false)
