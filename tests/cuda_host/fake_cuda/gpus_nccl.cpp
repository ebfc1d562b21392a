// Collectives over NCCL in CUDA's streams, as calls and as a captured graph.
#include <barrier>
#include <thread>

#include "cuda/nccl/nccl_communicator.h"
#include "gpus.h"

namespace dpcore::gpus {
namespace {

StreamCommunicator::Work average(StreamCommunicator& comm, const Tensor& tensor,
                                 Device::Stream current, const std::string& algorithm = "") {
  Request request;
  request.collective = Collective::all_reduce;
  request.op = ReduceOp::mean;
  request.dtype = DType::f32;
  request.count = tensor.count();
  request.input = request.output = tensor.data();
  return comm.submit(std::move(request), algorithm, current);
}

// Each rank adds its number, then all average: by NCCL, and by our own ring over its messages.
void calls(StreamCommunicator& comm, Device::Stream stream) {
  const auto mean = static_cast<float>(comm.world() + 1) / 2;
  Tensor tensor(comm.device(), 5000);
  const auto registered = comm.register_memory(tensor.data(), tensor.count() * sizeof(float));
  for (const char* algorithm : {"", "ring/moves"}) {
    tensor.fill(static_cast<float>(comm.rank() + 1));
    const auto work = average(comm, tensor, stream, algorithm);
    comm.order(work, stream);
    comm.device().synchronize(stream);
    CHECK(tensor.holds(mean));
    comm.wait(work, 0, nullptr);
  }
}

cudaGraphExec_t captured(StreamCommunicator& comm, const Tensor& tensor, Device::Stream stream,
                         std::barrier<>& all, std::mutex& capturing) {
  cudaGraph_t graph = nullptr;
  all.arrive_and_wait();  // nobody does anything else while one captures
  {
    const std::lock_guard<std::mutex> lock(capturing);
    CHECK(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeGlobal) ==
          cudaSuccess);
    comm.order(average(comm, tensor, stream), stream);
    CHECK(cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph) == cudaSuccess);
  }
  all.arrive_and_wait();
  cudaGraphExec_t runs = nullptr;
  CHECK(cudaGraphInstantiate(&runs, graph, 0) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  return runs;
}

void replays(StreamCommunicator& comm, Tensor& tensor, cudaGraphExec_t runs, Device::Stream stream,
             std::barrier<>& all) {
  constexpr int kReplays = 3;
  for (int i = 0; i < kReplays; ++i) {
    tensor.fill(static_cast<float>(comm.rank() + i));
    CHECK(cudaGraphLaunch(runs, static_cast<cudaStream_t>(stream)) == cudaSuccess);
    comm.device().synchronize(stream);
    CHECK(tensor.holds(static_cast<float>(comm.world() - 1) / 2 + static_cast<float>(i)));
    all.arrive_and_wait();  // the stand-in knows its barriers by number
  }
}

// The program ends its communicators while its graphs are still there, in order or by a failure.
void ends_before_its_graph(bool in_order, int world, int rank, std::barrier<>& all,
                           std::mutex& capturing) {
  auto comm = NcclCommunicator::start(meet({in_order ? "nccl" : "nccl fails", world, world}, rank),
                                      cuda_device(rank), {30.0, "auto", false, nullptr}, {});
  CHECK((!in_order || !fake_cuda::has_context()) && !fake_cuda::has_error());
  const Program program(comm->device());
  const Device::Stream stream = program.stream();
  Tensor tensor(comm->device(), 700);
  calls(*comm, stream);
  const cudaGraphExec_t runs = captured(*comm, tensor, stream, all, capturing);
  replays(*comm, tensor, runs, stream, all);
  calls(*comm, stream);
  if (!in_order) {
    comm->abort("the program gives up");
  }
  comm->close();
  CHECK(cudaGraphExecDestroy(runs) == cudaSuccess);
}

void run_rank(int world, int rank, std::barrier<>& all, std::mutex& capturing) {
  CHECK(!fake_cuda::has_context());
  ends_before_its_graph(true, world, rank, all, capturing);
  ends_before_its_graph(false, world, rank, all, capturing);
  CHECK(!fake_cuda::has_error());
}

}  // namespace

void over_nccl(int world) {
  fake_cuda::have_devices(world);
  std::barrier<> all(world);
  std::mutex capturing;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] { run_rank(world, rank, all, capturing); });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  nothing_is_left();
}

}  // namespace dpcore::gpus
