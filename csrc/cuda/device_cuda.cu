// A GPU as a Device, over the CUDA runtime that is linked into the module.
#include <cuda_runtime.h>

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "comm/error.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/probe.h"

namespace dpcore {
namespace {

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    char text[2 * sizeof(properties.uuid.bytes) + 1];
    for (size_t i = 0; i < sizeof(properties.uuid.bytes); ++i) {
      std::snprintf(text + 2 * i, 3, "%02x", static_cast<unsigned char>(properties.uuid.bytes[i]));
    }
    uuid_ = text;
  }

  std::string name() const override { return "cuda:" + std::to_string(index_); }
  std::string uuid() const override { return uuid_; }
  void attach() override { check(cudaSetDevice(index_), "cudaSetDevice"); }

  Stream make_stream() override {
    int least = 0;
    int greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    // Non-blocking: not ordered after the legacy default stream, only where events say so.
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
          "cudaStreamCreateWithPriority");
    return stream;
  }
  // Returns at once; CUDA lets go of the stream when its work is done. Errors have no one to tell.
  void destroy_stream(Stream stream) override { cudaStreamDestroy(as_stream(stream)); }

  Event make_event() override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  void destroy_event(Event event) override { cudaEventDestroy(as_event(event)); }
  void record(Event event, Stream stream) override {
    check(cudaEventRecord(as_event(event), as_stream(stream)), "cudaEventRecord");
  }
  void wait(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent");
  }
  bool has_happened(Event event) override {
    // Asked by a thread of its own, also while the program captures a graph on another.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t answer = cudaEventQuery(as_event(event));
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (answer == cudaErrorNotReady) {
      cudaGetLastError();  // an answer, not an error to be found by the next call
      return false;
    }
    check(answer, "cudaEventQuery");
    return true;
  }
  Event make_timed_event() override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    return event;
  }
  int64_t elapsed_ns(Event from, Event to) override {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, as_event(from), as_event(to)), "cudaEventElapsedTime");
    return static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  }
  void synchronize(Stream stream) override {
    check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
  }
  bool is_caller(Stream) const override { return false; }
  bool is_capturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  std::byte* allocate(size_t bytes) override {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc of " + std::to_string(bytes) + " bytes");
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory) override { cudaFree(memory); }

  MemoryHandle share_memory(std::byte* memory) override {
    MemoryHandle handle;
    handle.process = getpid();
    handle.device = index_;
    handle.address = reinterpret_cast<uint64_t>(memory);
    // The handle leads to the beginning of the allocation that the memory is a part of.
    unsigned long long base = 0;
    size_t bytes = 0;
    check_driver(driver_.address_range(&base, &bytes, handle.address), "cuMemGetAddressRange");
    handle.offset = handle.address - base;
    cudaIpcMemHandle_t ipc{};
    static_assert(sizeof(ipc) == sizeof(handle.handle));
    check(cudaIpcGetMemHandle(&ipc, reinterpret_cast<void*>(base)), "cudaIpcGetMemHandle");
    std::memcpy(handle.handle, &ipc, sizeof(ipc));
    return handle;
  }
  std::byte* map_memory(const MemoryHandle& handle) override {
    if (handle.process == getpid()) {
      enable_peer(handle.device);
      return reinterpret_cast<std::byte*>(handle.address);
    }
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, handle.handle, sizeof(ipc));
    void* base = nullptr;
    check(cudaIpcOpenMemHandle(&base, ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    auto* memory = static_cast<std::byte*>(base) + handle.offset;
    opened_[memory] = base;
    return memory;
  }
  void forget_memory(std::byte* memory) override {
    const auto found = opened_.find(memory);
    if (found == opened_.end()) return;
    cudaIpcCloseMemHandle(found->second);
    opened_.erase(found);
  }
  void* map_host(void* pages, size_t bytes) override {
    const cudaError_t error =
        cudaHostRegister(pages, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (error == cudaErrorHostMemoryAlreadyRegistered) {
      cudaGetLastError();  // by another rank of this process
    } else {
      check(error, "cudaHostRegister");
      registered_.insert(pages);
    }
    void* on_device = nullptr;
    check(cudaHostGetDevicePointer(&on_device, pages, 0), "cudaHostGetDevicePointer");
    return on_device;
  }
  void forget_host(void* pages) override {
    if (registered_.erase(pages) > 0) cudaHostUnregister(pages);
  }

  void wait_flag(Stream stream, uint32_t* flag, uint32_t number) override {
    constexpr unsigned kAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ, which compares around 2^32
    check_driver(
        driver_.wait_value(as_stream(stream), reinterpret_cast<uint64_t>(flag), number, kAtLeast),
        "cuStreamWaitValue32");
  }
  void raise_flag(Stream stream, uint32_t* flag, uint32_t number) override {
    constexpr unsigned kFenced = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT: what came before is visible
    check_driver(
        driver_.write_value(as_stream(stream), reinterpret_cast<uint64_t>(flag), number, kFenced),
        "cuStreamWriteValue32");
  }

  void reduce(Stream stream, const ReduceSpec& spec, std::span<const void* const> in,
              std::span<void* const> out, size_t count) override {
    launch(reduce_job(spec, in, out, count), stream);
  }
  void copy(Stream stream, void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, as_stream(stream)),
          "cudaMemcpyAsync");
  }
  void copy_parts(Stream stream, const PartList& list) override { launch(list, stream); }

 private:
  static cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }
  static cudaEvent_t as_event(Event event) { return static_cast<cudaEvent_t>(event); }

  void check(cudaError_t error, const std::string& call) const {
    if (error != cudaSuccess) {
      throw Error(name() + ": " + call + ": " + cudaGetErrorName(error) + " (" +
                  cudaGetErrorString(error) +
                  "). If an earlier kernel of the program caused it, CUDA_LAUNCH_BLOCKING=1 shows "
                  "which one");
    }
  }

  void check_driver(int result, const char* call) const {
    if (result != 0) {
      throw Error(name() + ": " + call + " answers CUresult " + std::to_string(result));
    }
  }

  // Devices of one process reach each other's memory when they are told to.
  void enable_peer(int other) {
    if (other == index_) return;
    const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
      return;
    }
    if (error != cudaSuccess) {
      cudaGetLastError();
      throw Unsupported(name() + " can't reach the memory of cuda:" + std::to_string(other) + " (" +
                        cudaGetErrorString(error) + "): use backend='nccl'");
    }
  }

  // Calls that only the driver has; asked for by name, so that nothing is linked against it.
  struct Driver {
    int (*wait_value)(cudaStream_t, unsigned long long, uint32_t, unsigned) = nullptr;
    int (*write_value)(cudaStream_t, unsigned long long, uint32_t, unsigned) = nullptr;
    int (*address_range)(unsigned long long*, size_t*, unsigned long long) = nullptr;

    Driver() {
      find("cuStreamWaitValue32", wait_value);
      find("cuStreamWriteValue32", write_value);
      find("cuMemGetAddressRange", address_range);
    }
    template <class Function>
    static void find(const char* name, Function& function) {
      constexpr unsigned kVersion = 12000;
      void* address = nullptr;
      cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
      const cudaError_t error =
          cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &found);
      if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        throw Unsupported(std::string("the NVIDIA driver lacks ") + name +
                          ": install one for CUDA 12.0 or newer");
      }
      function = reinterpret_cast<Function>(address);
    }
  };

  int index_;
  std::string uuid_;
  Driver driver_;
  std::map<std::byte*, void*> opened_;
  std::set<void*> registered_;
};

}  // namespace

std::shared_ptr<Device> cuda_device(int index) {
  const CudaProbe probe = probe_cuda(index);
  if (!probe.problem.empty()) throw Unsupported("no GPU can be used: " + probe.problem);
  if (index < 0 || index >= probe.devices) {
    throw Unsupported("cuda:" + std::to_string(index) + " does not exist: this process sees " +
                      std::to_string(probe.devices) +
                      " GPUs (CUDA_VISIBLE_DEVICES); pass torch.device('cuda', local_rank)");
  }
  auto device = std::make_shared<CudaDevice>(index);
  device->attach();
  return device;
}

}  // namespace dpcore
