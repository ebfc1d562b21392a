// The calls of a Device, one by one.
#include "cuda/device/probe.h"
#include "gpus.h"

namespace dpcore::gpus {
namespace {

void calls_leave_the_thread_as_it_was() {
  CHECK(probe_cuda().problem.empty() && probe_cuda().devices == 2);
  CHECK(!fake_cuda::has_context() && !fake_cuda::has_error());
  const auto first = cuda_device(0);
  const auto second = cuda_device(1);
  CHECK(first->uuid() != second->uuid() && first->uuid().size() == 32);
  CHECK(fake_cuda::calls()["cudaFuncGetAttributes"] > 20);  // kernels are there before a launch
  CHECK(!fake_cuda::has_context());
  {
    const DeviceGuard program(*first);
    int current = -1;
    {
      const DeviceGuard here(*second);
      CHECK(cudaGetDevice(&current) == cudaSuccess && current == 1);
    }
    CHECK(cudaGetDevice(&current) == cudaSuccess && current == 0);
  }
  CHECK(!fake_cuda::has_context());
  bool raised = false;
  try {
    cuda_device(2);
  } catch (const Unsupported& problem) {
    raised = std::string(problem.what()).find("this process sees 2 GPUs") != std::string::npos;
  }
  CHECK(raised && !fake_cuda::has_error());
}

void events_order_streams() {
  const auto device = cuda_device(0);
  const DeviceGuard here(*device);
  const Device::Stream one = device->make_stream();
  const Device::Stream other = device->make_stream();
  const Device::Event event = device->make_event();
  CHECK(device->has_happened(event));  // never recorded
  Tensor from(*device, 4000);
  Tensor to(*device, 4000);
  from.fill(3.0F);
  const std::byte* in[] = {from.data()};
  std::byte* out[] = {to.data()};
  device->reduce(one, {DType::f32, ReduceOp::sum}, {reinterpret_cast<const void**>(in), 1},
                 {reinterpret_cast<void**>(out), 1}, 4000);
  device->record(event, one);
  device->wait(other, event);
  device->copy(other, from.data(), to.data(), 2000);
  device->synchronize(other);
  CHECK(device->has_happened(event) && device->is_idle(other) && !device->is_capturing(one));
  CHECK(to.holds(3.0F) && from.holds(3.0F));
  const Device::Event begin = device->make_timed_event();
  const Device::Event end = device->make_timed_event();
  device->record(begin, one);
  device->record(end, one);
  device->synchronize(one);
  CHECK(device->elapsed_ns(begin, end) >= 0);
  for (const Device::Event e : {event, begin, end}) {
    device->destroy_event(e);
  }
  device->destroy_stream(one);
  device->destroy_stream(other);
  CHECK(!fake_cuda::has_error());
}

// Gradients of one launch, cast on the way.
void parts_become_a_bucket() {
  const auto device = cuda_device(0);
  const DeviceGuard here(*device);
  const Device::Stream stream = device->make_stream();
  Tensor small(*device, 7);
  Tensor large(*device, 20'001);
  Tensor bucket(*device, 20'016);
  small.fill(1.5F);
  large.fill(-2.0F);
  bucket.fill(0.0F);
  const std::vector<FlatPart> parts = {{small.data(), 0, 7}, {large.data(), 32, 20'001}};
  std::vector<PartList> lists;
  fill_part_lists(lists, parts, DType::f32, bucket.data(), DType::f32, true, 2.0);
  for (const PartList& list : lists) {
    device->copy_parts(stream, list);
  }
  device->synchronize(stream);
  std::vector<float> host(20'016);
  fake_cuda::read(host.data(), bucket.data(), host.size() * sizeof(float));
  CHECK(host[0] == 3.0F && host[6] == 3.0F && host[7] == 0.0F);
  CHECK(host[8] == -4.0F && host[20'008] == -4.0F && host[20'009] == 0.0F);
  device->destroy_stream(stream);
}

void memory_goes_without_waiting_where_it_may() {
  const auto device = cuda_device(0);
  const DeviceGuard here(*device);
  const auto waits = [] {
    const auto calls = fake_cuda::calls();
    const auto of = [&](const char* name) {
      const auto found = calls.find(name);
      return found == calls.end() ? 0 : found->second;
    };
    return of("cudaDeviceSynchronize") + of("cudaFree");
  };
  for (const MemoryKind kind : {MemoryKind::address, MemoryKind::descriptor}) {
    std::byte* memory = device->allocate_shared(3'000'000, kind);
    const uint64_t before = waits();
    device->release_idle(memory);
    CHECK(waits() == before);
    memory = device->allocate_shared(3'000'000, kind);
    device->release(memory);
    CHECK(waits() > before);
  }
  fake_cuda::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
  std::string said;
  try {
    device->allocate(1000);
  } catch (const Error& problem) {
    said = problem.what();
  }
  CHECK(said ==
        "cuda:0: cudaMalloc of 1000 bytes: cudaErrorMemoryAllocation "
        "(cudaErrorMemoryAllocation)");
  CHECK(!fake_cuda::has_error());
}

}  // namespace

void one_device() {
  fake_cuda::have_devices(2);
  calls_leave_the_thread_as_it_was();
  events_order_streams();
  parts_become_a_bucket();
  memory_goes_without_waiting_where_it_may();
  nothing_is_left();
}

}  // namespace dpcore::gpus
