// What streams, events and graphs are made of: for streams.cpp and graphs.cpp.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "cuda/device/device_host.h"
#include "fake_cuda.h"

// A capture: what was put into the streams that take part in it.
struct Capture {
  std::vector<std::function<void()>> work;
  cudaStream_t origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool is_valid = true;
};

// A HostStream first of all: the stand-in for NCCL puts its work into those.
struct CUstream_st final : dpcore::HostStream {
  explicit CUstream_st(int on) : device(on) {
    HostStream::add([] { fake_cuda::let_this_thread_touch_devices(); });
  }
  // A piece of work, or of the graph that it is captured into.
  void add(std::function<void()> work) override;
  // Beside the work, whatever is captured.
  void mark(std::function<void()> call) { HostStream::add(std::move(call)); }

  int device;
  std::atomic<uint64_t> given{0};  // pieces of work
  std::atomic<uint64_t> done{0};
  std::shared_ptr<Capture> capture;  // while it takes part in one
  size_t last = 0;                   // item of that which came into this stream
  size_t joined = 0;                 // up to which item another stream of it has waited
};

namespace fake_cuda {

struct Recordings {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t happened = 0;
  int64_t happened_ns = 0;
};

}  // namespace fake_cuda

struct CUevent_st {
  CUevent_st(int on, bool timed) : device(on), is_timed(timed) {}
  int device;
  bool is_timed;
  std::shared_ptr<fake_cuda::Recordings> recordings = std::make_shared<fake_cuda::Recordings>();
  std::shared_ptr<Capture> capture;  // it was recorded in last
  CUstream_st* captured_in = nullptr;
  size_t captured_at = 0;
};

struct CUgraph_st {
  std::vector<std::function<void()>> work;
};

namespace fake_cuda {

struct Streams {
  std::mutex mutex;
  std::set<CUstream_st*> alive;
  std::vector<std::unique_ptr<CUstream_st>> ended;  // with work that is left
  std::unique_ptr<CUstream_st> own[kMostDevices];   // what null means, by device
  std::set<CUevent_st*> events;
  std::shared_ptr<Capture> capture;  // one at a time
};

Streams& streams();
// The stream, or what null means. With the lock.
CUstream_st* found(cudaStream_t stream);
// Of this thread, in captures.
cudaStreamCaptureMode& capture_mode();

}  // namespace fake_cuda
