// Graphs that are captured from streams. A graph is its work in the order in which it was given,
// which is one of the orders that its edges allow.
#include "streams.h"

using namespace fake_cuda;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode());
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FAKE_RUNTIME_CALL("cudaStreamIsCapturing");
  *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  if (stream == nullptr) {
    return answer(cudaErrorStreamCaptureUnsupported);
  }
  if (streams().capture) {
    misuse("two graphs are captured at once, which this stand-in can't");
  }
  streams().capture = std::make_shared<Capture>();
  streams().capture->origin = stream;
  streams().capture->mode = mode;
  found(stream)->capture = streams().capture;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  const std::shared_ptr<Capture> capture = std::move(streams().capture);
  streams().capture.reset();
  if (!capture || capture->origin != stream) {
    misuse("the end of a capture that has not begun");
  }
  bool is_joined = true;
  for (CUstream_st* part : streams().alive) {
    if (part->capture != capture) {
      continue;
    }
    if (part != stream && part->joined < part->last) {
      is_joined = false;
    }
    part->capture.reset();
    part->last = part->joined = 0;
  }
  if (!capture->is_valid) {
    return answer(cudaErrorStreamCaptureInvalidated);
  }
  if (!is_joined) {
    return answer(cudaErrorStreamCaptureUnjoined);
  }
  *graph = new CUgraph_st{std::move(capture->work)};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runs, cudaGraph_t graph, unsigned long long) {
  *runs = reinterpret_cast<cudaGraphExec_t>(new CUgraph_st(*graph));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runs, cudaStream_t stream) {
  for (const auto& work : reinterpret_cast<CUgraph_st*>(runs)->work) {
    enqueue(stream, work);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runs) {
  delete reinterpret_cast<CUgraph_st*>(runs);
  return cudaSuccess;
}

}  // extern "C"
