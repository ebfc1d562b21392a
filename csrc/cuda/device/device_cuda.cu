// A GPU as a Device, over the CUDA runtime that is linked into the module.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>
#include <set>
#include <string>

#include "comm/base/error.h"
#include "cuda/device/device.h"
#include "cuda/device/host_pages.h"
#include "cuda/device/memory_cuda.cuh"
#include "cuda/device/probe.h"
#include "cuda/kernels/driver.cuh"
#include "cuda/kernels/kernels.h"

namespace dpcore {
namespace {

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : index_(index), memory_(index) {
    Driver::get();  // here it says what is missing
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    char text[2 * sizeof(properties.uuid.bytes) + 1];
    for (size_t i = 0; i < sizeof(properties.uuid.bytes); ++i) {
      std::snprintf(text + 2 * i, 3, "%02x", static_cast<unsigned char>(properties.uuid.bytes[i]));
    }
    uuid_ = text;
  }
  ~CudaDevice() override {
    at_the_end(*this, [this] { memory_.stop_freeing(); });
  }

  std::string name() const override { return "cuda:" + std::to_string(index_); }
  std::string uuid() const override { return uuid_; }

  // What was there before is put back as a context, not by its number: that would make one on a
  // device that the program has not used so far. Nothing is put back as nothing: each runtime in
  // the process (torch has its own) then goes by what its program has chosen.
  Attachment attach() override {
    const Driver& driver = Driver::get();
    CUcontext before = nullptr;
    CUcontext own = nullptr;
    Driver::check(driver.current_context(&before), "cuCtxGetCurrent");
    check(cudaSetDevice(index_), "cudaSetDevice");
    Driver::check(driver.current_context(&own), "cuCtxGetCurrent");
    return {before != own, before};
  }
  void detach(const Attachment& was) noexcept override {
    if (was.changed) {
      Driver::get().make_context_current(static_cast<CUcontext>(was.before));
    }
  }

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
  // Returns at once; CUDA frees the stream when its work is done. Errors are ignored.
  void destroy_stream(Stream stream) override {
    Driver::ignore(cudaStreamDestroy(as_stream(stream)));
  }

  Event make_event() override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  // By any thread: without a context it would get one, of any device.
  void destroy_event(Event event) override {
    at_the_end(*this, [event] { Driver::ignore(cudaEventDestroy(as_event(event))); });
  }
  void record(Event event, Stream stream) override {
    check(cudaEventRecord(as_event(event), as_stream(stream)), "cudaEventRecord");
  }
  void wait(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent");
  }
  bool has_happened(Event event) override {
    // Asked by a thread of its own, also while the program captures a graph on another.
    const DeviceGuard here(*this);  // a thread without a context would get one, of any device
    const cudaError_t answer = relaxed([event] { return cudaEventQuery(as_event(event)); });
    return is_ready(answer, "cudaEventQuery");
  }
  bool is_idle(Stream stream) override {
    const cudaError_t answer = relaxed([stream] { return cudaStreamQuery(as_stream(stream)); });
    return is_ready(answer, "cudaStreamQuery");
  }
  void settle() override { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
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
    const DeviceGuard here(*this);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  std::byte* allocate(size_t bytes) override { return memory_.allocate(bytes); }
  void release(std::byte* memory) override { memory_.release(memory, false); }
  void release_idle(std::byte* memory) override { memory_.release(memory, true); }

  MemorySupport memory_support() override { return memory_.support(); }
  std::byte* allocate_shared(size_t bytes, MemoryKind kind) override {
    return memory_.allocate_shared(bytes, kind);
  }
  MemoryHandle share_memory(std::byte* memory) override { return memory_.share(memory); }
  std::byte* map_memory(const MemoryHandle& handle) override { return memory_.map(handle); }
  void forget_memory(std::byte* memory) override { memory_.forget(memory); }
  // In a stream of its own: others may hold work that waits for other ranks.
  void upload(std::byte* to, const void* from, size_t bytes) override {
    const Stream stream = make_stream();
    const cudaError_t error =
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, as_stream(stream));
    const cudaError_t end = cudaStreamSynchronize(as_stream(stream));
    destroy_stream(stream);
    check(error != cudaSuccess ? error : end, "cudaMemcpyAsync to the device");
  }
  MappedPages map_host(void* pages, size_t bytes) override {
    MappedPages mapped;
    mapped.registered = share_host_pages(
        pages, bytes,
        [&] {
          const unsigned flags = cudaHostRegisterMapped | cudaHostRegisterPortable;
          check(cudaHostRegister(pages, bytes, flags), "cudaHostRegister");
        },
        [pages] { Driver::ignore(cudaHostUnregister(pages)); });
    check(cudaHostGetDevicePointer(&mapped.on_device, pages, 0), "cudaHostGetDevicePointer");
    return mapped;
  }

  void wait_flag(Stream stream, uint32_t* flag, uint32_t number) override {
    const FlagNumber one{flag, number};
    wait_flags(stream, {&one, 1});
  }
  void raise_flag(Stream stream, uint32_t* flag, uint32_t number) override {
    const FlagNumber one{flag, number};
    raise_flags(stream, {&one, 1});
  }
  // GEQ compares around 2^32.
  void wait_flags(Stream stream, std::span<const FlagNumber> flags) override {
    work_on_flags(stream, flags, [](const FlagNumber& flag) {
      CUstreamBatchMemOpParams item{};
      item.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
      item.waitValue.address = reinterpret_cast<CUdeviceptr>(flag.flag);
      item.waitValue.value = flag.number;
      item.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      return item;
    });
  }
  // The default puts a fence before the write: what came before is visible.
  void raise_flags(Stream stream, std::span<const FlagNumber> flags) override {
    work_on_flags(stream, flags, [](const FlagNumber& flag) {
      CUstreamBatchMemOpParams item{};
      item.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
      item.writeValue.address = reinterpret_cast<CUdeviceptr>(flag.flag);
      item.writeValue.value = flag.number;
      item.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      return item;
    });
  }

  void reduce(Stream stream, const ReduceSpec& spec, std::span<const void* const> in,
              std::span<void* const> out, size_t count) override {
    launch(reduce_job(spec, in, out, count), stream);
  }
  void reduce_together(Stream stream, const ReduceSpec& spec, std::span<const void* const> in,
                       std::span<void* const> out, size_t count, const ShareSync& sync) override {
    launch(reduce_job(spec, in, out, count), sync, stream);
  }
  void copy(Stream stream, void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, as_stream(stream)),
          "cudaMemcpyAsync");
  }
  void copy_parts(Stream stream, const PartList& list) override { launch(list, stream); }

 private:
  static cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }
  static cudaEvent_t as_event(Event event) { return static_cast<cudaEvent_t>(event); }

  // Asked by threads of our own, also while the program captures a graph on another one.
  template <class Ask>
  static cudaError_t relaxed(Ask ask) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t answer = ask();
    cudaThreadExchangeStreamCaptureMode(&mode);
    return answer;
  }
  bool is_ready(cudaError_t answer, const char* call) const {
    if (answer == cudaErrorNotReady) {
      cudaGetLastError();  // an answer, not an error to be found by the next call
      return false;
    }
    check(answer, call);
    return true;
  }

  void check(cudaError_t error, const std::string& call) const {
    if (error != cudaSuccess) {
      cudaGetLastError();  // told here
      throw Error(name() + ": " + call + ": " + cudaGetErrorName(error) + " (" +
                  cudaGetErrorString(error) +
                  "). If an earlier kernel of the program caused it, CUDA_LAUNCH_BLOCKING=1 shows "
                  "which one");
    }
  }

  template <class MakeItem>
  void work_on_flags(Stream stream, std::span<const FlagNumber> flags, MakeItem make) {
    std::array<CUstreamBatchMemOpParams, kBarrierRanks> items;  // rarely more at once
    while (!flags.empty()) {
      const auto now = flags.first(std::min(flags.size(), items.size()));
      std::transform(now.begin(), now.end(), items.begin(), make);
      const CUresult result = Driver::get().stream_batch(
          as_stream(stream), static_cast<unsigned>(now.size()), items.data(), 0);
      if (result != CUDA_SUCCESS) {
        Driver::check(result, name() + ": cuStreamBatchMemOp");
      }
      flags = flags.subspan(now.size());
    }
  }

  int index_;
  std::string uuid_;
  CudaMemory memory_;
};

// Of devices of this process on which a kernel has run already: trying it once more would wait for
// all that runs there.
bool is_known_to_work(int index, bool now = false) {
  static std::mutex mutex;
  static std::set<int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (now) {
    known.insert(index);
  }
  return known.contains(index);
}

}  // namespace

std::shared_ptr<Device> cuda_device(int index) {
  if (is_known_to_work(index)) {
    return std::make_shared<CudaDevice>(index);
  }
  const CudaProbe probe = probe_cuda(index);
  if (!probe.problem.empty()) {
    throw Unsupported("no GPU can be used: " + probe.problem);
  }
  if (index < 0 || index >= probe.devices) {
    throw Unsupported("cuda:" + std::to_string(index) + " does not exist: this process sees " +
                      std::to_string(probe.devices) +
                      " GPUs (CUDA_VISIBLE_DEVICES); pass torch.device('cuda', local_rank)");
  }
  auto device = std::make_shared<CudaDevice>(index);
  {
    const DeviceGuard here(*device);
    load_kernels();
  }
  is_known_to_work(index, true);
  return device;
}

}  // namespace dpcore
