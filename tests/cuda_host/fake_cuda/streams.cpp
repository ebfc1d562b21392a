// Streams and events.
#include "streams.h"

#include "comm/base/clock.h"

namespace fake_cuda {

Streams& streams() {
  static auto* it = new Streams;
  return *it;
}

cudaStreamCaptureMode& capture_mode() {
  static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

CUstream_st* found(cudaStream_t stream) {
  if (stream != nullptr) {
    if (!streams().alive.contains(stream)) {
      misuse("a stream that there is not (any more)");
    }
    return stream;
  }
  const int device = current_device_or_first();
  auto& own = streams().own[device];
  if (!own) {
    own = std::make_unique<CUstream_st>(device);
  }
  return own.get();
}

namespace {

void check_event(cudaEvent_t event) {
  if (!streams().events.contains(event)) {
    misuse("an event that there is not (any more)");
  }
}

void happens(const std::shared_ptr<Recordings>& of, uint64_t recording) {
  const std::lock_guard<std::mutex> lock(of->mutex);
  of->happened = std::max(of->happened, recording);
  of->happened_ns = dpcore::now_ns();
  of->changed.notify_all();
}

}  // namespace

bool is_ours(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  return found(stream)->device == current_device_or_first();
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
  CUstream_st* into = nullptr;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    into = found(stream);
  }
  into->add(std::move(work));
}

bool is_captured(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  return stream != nullptr && found(stream)->capture != nullptr;
}

bool may_disturb() {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  const auto& capture = streams().capture;
  if (!capture || capture->mode == cudaStreamCaptureModeRelaxed) {
    return true;
  }
  if (capture_mode() == cudaStreamCaptureModeRelaxed) {
    return true;
  }
  capture->is_valid = false;
  return false;
}

void wait_for_stream(cudaStream_t stream) {
  const auto done = std::make_shared<Recordings>();
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    found(stream)->mark([done] { happens(done, 1); });
  }
  std::unique_lock<std::mutex> lock(done->mutex);
  done->changed.wait(lock, [&] { return done->happened == 1; });
}

void wait_for_device(int device) {
  std::vector<std::shared_ptr<Recordings>> all;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    const auto ask = [&](CUstream_st& stream) {
      if (stream.device != device) {
        return;
      }
      all.push_back(std::make_shared<Recordings>());
      stream.mark([done = all.back()] { happens(done, 1); });
    };
    for (CUstream_st* stream : streams().alive) {
      ask(*stream);
    }
    for (const auto& stream : streams().ended) {
      ask(*stream);
    }
    if (streams().own[device]) {
      ask(*streams().own[device]);
    }
  }
  for (const auto& done : all) {
    std::unique_lock<std::mutex> lock(done->mutex);
    done->changed.wait(lock, [&] { return done->happened == 1; });
  }
}

std::string streams_left() {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  streams().ended.clear();  // waits for what is left in them
  std::string text;
  if (!streams().alive.empty()) {
    text += std::to_string(streams().alive.size()) + " streams\n";
  }
  if (!streams().events.empty()) {
    text += std::to_string(streams().events.size()) + " events\n";
  }
  return text;
}

}  // namespace fake_cuda

using namespace fake_cuda;

void CUstream_st::add(std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    if (capture) {
      capture->work.push_back(std::move(work));
      last = capture->work.size();
      return;
    }
  }
  given.fetch_add(1);
  HostStream::add([this, work = std::move(work)] {  // may wait for room
    work();
    done.fetch_add(1);
  });
}

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  FAKE_RUNTIME_CALL("cudaStreamCreateWithPriority");
  if (flags != cudaStreamNonBlocking || priority > 0 || priority < -5) {
    return answer(cudaErrorInvalidValue);  // a blocking one is ordered after others: not made here
  }
  *stream = new CUstream_st(current_device_or_first());
  const std::lock_guard<std::mutex> lock(streams().mutex);
  streams().alive.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
// Returns at once.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  FAKE_RUNTIME_CALL("cudaStreamDestroy");
  needs_context("cudaStreamDestroy");
  if (stream == nullptr) {
    return answer(cudaErrorInvalidResourceHandle);
  }
  const std::lock_guard<std::mutex> lock(streams().mutex);
  streams().alive.erase(found(stream));
  streams().ended.emplace_back(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  FAKE_RUNTIME_CALL("cudaStreamSynchronize");
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  wait_for_stream(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  FAKE_RUNTIME_CALL("cudaStreamQuery");
  if (!may_disturb() || is_captured(stream)) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  const std::lock_guard<std::mutex> lock(streams().mutex);
  const CUstream_st& asked = *found(stream);
  return answer(asked.done == asked.given ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  FAKE_RUNTIME_CALL("cudaEventCreateWithFlags");
  *event = new CUevent_st(current_device_or_first(), (flags & cudaEventDisableTiming) == 0);
  const std::lock_guard<std::mutex> lock(streams().mutex);
  streams().events.insert(*event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  needs_context("cudaEventDestroy");
  const std::lock_guard<std::mutex> lock(streams().mutex);
  check_event(event);
  streams().events.erase(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE_RUNTIME_CALL("cudaEventRecord");
  std::shared_ptr<Recordings> of;
  uint64_t recording = 0;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    check_event(event);
    CUstream_st* in = found(stream);
    if (in->device != event->device) {
      return answer(cudaErrorInvalidResourceHandle);
    }
    event->capture = in->capture;
    event->captured_in = in;
    event->captured_at = in->last;
    if (in->capture) {
      return cudaSuccess;  // an edge of the graph, and no moment
    }
    of = event->recordings;
    const std::lock_guard<std::mutex> recordings(of->mutex);
    recording = ++of->recorded;
  }
  enqueue(stream, [of, recording] { happens(of, recording); });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  FAKE_RUNTIME_CALL("cudaStreamWaitEvent");
  if (flags != 0) {
    return answer(cudaErrorInvalidValue);
  }
  std::shared_ptr<Recordings> of;
  uint64_t recording = 0;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    check_event(event);
    CUstream_st* waits = found(stream);
    if (event->capture && event->capture == streams().capture) {
      if (waits->capture && waits->capture != event->capture) {
        return answer(cudaErrorStreamCaptureMerge);
      }
      waits->capture = event->capture;  // takes part from here on
      event->captured_in->joined = std::max(event->captured_in->joined, event->captured_at);
      return cudaSuccess;
    }
    if (waits->capture) {
      return answer(cudaErrorStreamCaptureIsolation);
    }
    of = event->recordings;
    const std::lock_guard<std::mutex> recordings(of->mutex);
    recording = of->recorded;
  }
  enqueue(stream, [of, recording] {
    std::unique_lock<std::mutex> lock(of->mutex);
    of->changed.wait(lock, [&] { return of->happened >= recording; });
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_RUNTIME_CALL("cudaEventQuery");
  if (!may_disturb()) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  const std::lock_guard<std::mutex> lock(streams().mutex);
  check_event(event);
  if (event->capture) {
    return answer(cudaErrorCapturedEvent);
  }
  const std::lock_guard<std::mutex> recordings(event->recordings->mutex);
  const bool is_over = event->recordings->happened >= event->recordings->recorded;
  return answer(is_over ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  FAKE_RUNTIME_CALL("cudaEventElapsedTime");
  const std::lock_guard<std::mutex> lock(streams().mutex);
  int64_t at[2] = {};
  for (int i = 0; i < 2; ++i) {
    const cudaEvent_t event = i == 0 ? from : to;
    check_event(event);
    const std::lock_guard<std::mutex> recordings(event->recordings->mutex);
    if (!event->is_timed || event->recordings->recorded == 0) {
      return answer(cudaErrorInvalidResourceHandle);
    }
    if (event->recordings->happened < event->recordings->recorded) {
      return answer(cudaErrorNotReady);
    }
    at[i] = event->recordings->happened_ns;
  }
  *ms = static_cast<float>(static_cast<double>(at[1] - at[0]) / 1e6);
  return cudaSuccess;
}

}  // extern "C"
