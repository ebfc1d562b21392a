// See device_host.h.
#include "cuda/device/device_host.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "cuda/device/host_pages.h"
#include "cuda/device/memory_host.h"
#include "cuda/kernels/reduce_job.h"

namespace dpcore {
namespace {

constexpr auto kFlagNap = std::chrono::microseconds(20);
constexpr size_t kWorkers = 3;  // a small number that does not divide much

thread_local Device* t_current = nullptr;

// How often it was recorded, and how many of these recordings have happened.
class HostEvent {
 public:
  uint64_t next_recording() { return recorded_.fetch_add(1) + 1; }
  uint64_t last_recording() const { return recorded_.load(); }
  void happens(uint64_t recording) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (recording > happened_) {
      happened_ = recording;
    }
    happened_ns_ = now_ns();
    changed_.notify_all();
  }
  void wait_for(uint64_t recording) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return happened_ >= recording; });
  }
  bool has_happened() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return happened_ >= recorded_.load();
  }
  int64_t when_ns() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return happened_ns_;
  }

 private:
  std::atomic<uint64_t> recorded_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t happened_ = 0;
  int64_t happened_ns_ = 0;  // the last time
};

// Held by the work that will make it happen, so that it may be destroyed before, as on a GPU.
using SharedEvent = std::shared_ptr<HostEvent>;

class HostDevice final : public Device {
 public:
  explicit HostDevice(std::string uuid) : uuid_(std::move(uuid)) {}

  std::string name() const override { return "host"; }
  std::string uuid() const override { return uuid_; }
  Attachment attach() override { return {true, std::exchange(t_current, this)}; }
  void detach(const Attachment& was) noexcept override {
    t_current = static_cast<Device*>(was.before);
  }

  Stream make_stream() override {
    check_current("make_stream");
    return new HostStream;
  }
  void destroy_stream(Stream stream) override {
    check_current("destroy_stream");
    delete static_cast<HostStream*>(stream);
  }
  Event make_event() override {
    check_current("make_event");
    return new SharedEvent(std::make_shared<HostEvent>());
  }
  void destroy_event(Event event) override { delete static_cast<SharedEvent*>(event); }

  void record(Event event, Stream stream) override {
    const SharedEvent& of = *static_cast<SharedEvent*>(event);
    add(stream, [of, recording = of->next_recording()] { of->happens(recording); });
  }
  void wait(Stream stream, Event event) override {
    const SharedEvent& of = *static_cast<SharedEvent*>(event);
    add(stream, [of, recording = of->last_recording()] { of->wait_for(recording); });
  }
  bool has_happened(Event event) override {
    return (*static_cast<SharedEvent*>(event))->has_happened();
  }
  Event make_timed_event() override { return make_event(); }
  int64_t elapsed_ns(Event from, Event to) override {
    return (*static_cast<SharedEvent*>(to))->when_ns() -
           (*static_cast<SharedEvent*>(from))->when_ns();
  }
  bool is_idle(Stream stream) override {
    check_current("is_idle");
    return stream == nullptr || static_cast<HostStream*>(stream)->is_idle();
  }
  void settle() override { check_current("settle"); }
  void synchronize(Stream stream) override {
    HostEvent done;
    const uint64_t recording = done.next_recording();
    add(stream, [&] { done.happens(recording); });
    done.wait_for(recording);
  }
  bool is_caller(Stream stream) const override { return stream == nullptr; }
  bool is_capturing(Stream) override { return false; }

  std::byte* allocate(size_t bytes) override {
    check_current("allocate");
    return memory_.allocate(bytes);
  }
  void release(std::byte* memory) override {
    check_current("release");
    memory_.release(memory);
  }
  void release_idle(std::byte* memory) override { release(memory); }
  MemorySupport memory_support() override {
    check_current("memory_support");
    return {process_mark(), true, false};
  }
  std::byte* allocate_shared(size_t bytes, MemoryKind kind) override {
    check_current("allocate_shared");
    return memory_.allocate_shared(bytes, kind);
  }
  MemoryHandle share_memory(std::byte* memory) override {
    check_current("share_memory");
    return memory_.share(memory);
  }
  std::byte* map_memory(const MemoryHandle& handle) override {
    check_current("map_memory");
    return memory_.map(handle);
  }
  void forget_memory(std::byte* memory) override {
    check_current("forget_memory");
    memory_.forget(memory);
  }
  void upload(std::byte* to, const void* from, size_t bytes) override {
    check_current("upload");
    std::memcpy(to, from, bytes);
  }
  MappedPages map_host(void* pages, size_t bytes) override {
    check_current("map_host");
    return {pages, share_host_pages(pages, bytes, [] {}, [] {})};
  }

  void wait_flag(Stream stream, uint32_t* flag, uint32_t number) override {
    check_flag(flag);
    add(stream, [=] {
      const std::atomic_ref<uint32_t> value(*flag);
      while (static_cast<int32_t>(value.load(std::memory_order_acquire) - number) < 0) {
        std::this_thread::sleep_for(kFlagNap);
      }
    });
  }
  void raise_flag(Stream stream, uint32_t* flag, uint32_t number) override {
    check_flag(flag);
    add(stream, [=] { std::atomic_ref<uint32_t>(*flag).store(number, std::memory_order_release); });
  }

  void reduce(Stream stream, const ReduceSpec& spec, std::span<const void* const> in,
              std::span<void* const> out, size_t count) override {
    // Checked and copied now, as the arguments of a kernel are.
    add(stream, [job = reduce_job(spec, in, out, count)] { run_on_host(job, kWorkers); });
  }
  void reduce_together(Stream stream, const ReduceSpec& spec, std::span<const void* const> in,
                       std::span<void* const> out, size_t count, const ShareSync& sync) override {
    add(stream, [job = reduce_job(spec, in, out, count), sync] { run_on_host(job, sync); });
  }
  void copy(Stream stream, void* to, const void* from, size_t bytes) override {
    add(stream, [=] { std::memmove(to, from, bytes); });
  }
  void copy_parts(Stream stream, const PartList& list) override {
    add(stream, [list] { copy_on_host(list, kWorkers); });
  }

 private:
  // A GPU refuses, or works on another one: here it is an error at once.
  void check_current(const char* call) const {
    if (t_current != this) {
      throw Error(std::string("host: ") + call + " by a thread for which it is not current");
    }
  }
  static void check_flag(const void* flag) {
    if (!are_host_pages_shared(flag)) {
      throw Error("host: a flag in pages that are not mapped");
    }
  }
  void add(Stream stream, std::function<void()> work) const {
    check_current("work in a stream");
    if (stream == nullptr) {
      work();
    } else {
      static_cast<HostStream*>(stream)->add(std::move(work));
    }
  }

  std::string uuid_;
  HostMemory memory_;
};

}  // namespace

const Device* current_host_device() { return t_current; }

std::shared_ptr<Device> host_device(std::string uuid) {
  return std::make_shared<HostDevice>(std::move(uuid));
}

}  // namespace dpcore
