// A device as communicators see it: memory, streams of work, and events that order them.
//
// Two implementations. On a GPU (device_cuda.cu) a stream is a cudaStream_t. On the host
// (device_host.h) memory is ordinary and a stream is a thread: there communicators for GPUs run
// without a GPU, with the same ordering, which tests and the thread sanitizer check. No code above
// this file depends on which of the two it has.
//
// Memory: streams, events and allocations belong to the code that made them, until the device is
// gone. Threads: any thread may call while it has a DeviceGuard; has_happened(), is_capturing(),
// name(), uuid() and destroying events need none. Work is waited for by synchronize() and settle(),
// by what takes away memory that may be in use (release, forget_memory), by upload(), and by
// whatever puts work into a stream whose queue is full: then until there is room. Calls throw Error
// with the device's name and the call that failed; after an error of the device itself all do.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "comm/base/error.h"
#include "comm/reduce/reduce.h"
#include "cuda/device/memory_choice.h"
#include "cuda/kernels/part_copy.h"
#include "cuda/kernels/share_sync.h"

namespace dpcore {

// Memory of a device as another rank can find it, in this process or in another one of the host.
struct MemoryHandle {
  MemoryKind kind = MemoryKind::address;
  uint64_t process = 0;  // process_mark()
  int32_t device = 0;
  int32_t descriptor = -1;  // of the process that holds the handle now, which closes it
  uint64_t address = 0;     // in that process
  uint64_t bytes = 0;       // behind a descriptor; of ipc, from where the handle leads
  unsigned char handle[64] = {};
};

// Pages of the host that a device can read and write, as long as `registered` lives.
struct MappedPages {
  void* on_device = nullptr;
  std::shared_ptr<void> registered;
};

struct FlagNumber {
  uint32_t* flag = nullptr;
  uint32_t number = 0;
};

class Device {
 public:
  // Null: the stream in which work runs that names none. On the host that is the caller itself.
  using Stream = void*;
  using Event = void*;

  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cuda:0", "host"
  // Identifies the hardware: ranks with equal texts share one GPU.
  virtual std::string uuid() const = 0;
  // From here on calls of this thread are for this device; what they were for is the result, which
  // detach() puts back. See DeviceGuard.
  struct Attachment {
    bool changed = false;
    void* before = nullptr;
  };
  virtual Attachment attach() = 0;
  virtual void detach(const Attachment& was) noexcept = 0;

  // Work in it goes first when the device has a choice.
  virtual Stream make_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;
  virtual Event make_event() = 0;
  virtual void destroy_event(Event event) = 0;
  // The event happens when all that is in the stream now is done.
  virtual void record(Event event, Stream stream) = 0;
  // What comes into the stream from now on waits for the event as recorded last.
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool has_happened(Event event) = 0;
  // An event that knows when it happened, and the time between two that have.
  virtual Event make_timed_event() = 0;
  virtual int64_t elapsed_ns(Event from, Event to) = 0;
  virtual void synchronize(Stream stream) = 0;
  // All that the stream was given is done. Never waits; not while it is captured.
  virtual bool is_idle(Stream stream) = 0;
  // Work in the stream runs at once, on the thread that puts it there.
  virtual bool is_caller(Stream stream) const = 0;
  // Work is recorded into a graph instead of running: events can't be asked.
  virtual bool is_capturing(Stream stream) = 0;

  virtual std::byte* allocate(size_t bytes) = 0;
  // Waits for the device: work of the program, in streams that are not known here, may use it.
  virtual void release(std::byte* memory) = 0;
  // No work uses it any more: waits for nothing. Waiting for the device means waiting for all of
  // the process, also for what another rank, as a thread of it, has told to wait for this one.
  virtual void release_idle(std::byte* memory) = 0;
  // All work of this process on the device is done, as far as it was given by now.
  virtual void settle() = 0;

  // For other ranks of the host: memory that they can map, its handle, and the memory of a handle.
  virtual MemorySupport memory_support() = 0;
  virtual std::byte* allocate_shared(size_t bytes, MemoryKind kind) = 0;  // ends as allocate()'s
  virtual MemoryHandle share_memory(std::byte* memory) = 0;
  virtual std::byte* map_memory(const MemoryHandle& handle) = 0;
  virtual void forget_memory(std::byte* memory) = 0;  // what map_memory gave; no work uses it
  // Writes ordinary memory into the device's; when it returns, all work can read it.
  virtual void upload(std::byte* to, const void* from, size_t bytes) = 0;
  // Whole pages of the host, also those that other ranks of this process have mapped.
  virtual MappedPages map_host(void* pages, size_t bytes) = 0;

  // Into the stream, on flags in such pages: the stream goes on when the flag is `number` or up to
  // 2^31 - 1 more, counted around; the flag becomes `number` when all before is done and visible.
  virtual void wait_flag(Stream stream, uint32_t* flag, uint32_t number) = 0;
  virtual void raise_flag(Stream stream, uint32_t* flag, uint32_t number) = 0;
  // All of them, as one item of work where the device can.
  virtual void wait_flags(Stream stream, std::span<const FlagNumber> flags) {
    for (const FlagNumber& flag : flags) {
      wait_flag(stream, flag.flag, flag.number);
    }
  }
  virtual void raise_flags(Stream stream, std::span<const FlagNumber> flags) {
    for (const FlagNumber& flag : flags) {
      raise_flag(stream, flag.flag, flag.number);
    }
  }

  // Into the stream:
  virtual void reduce(Stream stream, const ReduceSpec& spec, std::span<const void* const> in,
                      std::span<void* const> out, size_t count) = 0;
  // The same on memory that other ranks reach too, see share_sync.h.
  virtual void reduce_together(Stream stream, const ReduceSpec& spec,
                               std::span<const void* const> in, std::span<void* const> out,
                               size_t count, const ShareSync& sync) = 0;
  virtual void copy(Stream stream, void* to, const void* from, size_t bytes) = 0;
  virtual void copy_parts(Stream stream, const PartList& list) = 0;
};

// While it lives, calls of this thread are for the device; then for the one that was current
// before, which is the program's to choose.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device& device) : device_(device), was_(device.attach()) {}
  ~DeviceGuard() { device_.detach(was_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  Device& device_;
  Device::Attachment was_;
};

// For destructors, which cannot report errors: where the device is broken, nothing is left to do.
template <class Work>
void at_the_end(Device& device, Work work) noexcept {
  try {
    const DeviceGuard here(device);
    work();
  } catch (const Error&) {
  }
}

// "cuda:1", or "host": the device of device_host.h, which says to be the hardware `uuid`.
std::shared_ptr<Device> device_named(const std::string& name, const std::string& uuid = "");

// The GPU with this number. Throws Unsupported, saying what is missing, where it can't be used.
std::shared_ptr<Device> cuda_device(int index);

}  // namespace dpcore
