// A step that is captured into a graph, and where that is refused.
#include <barrier>
#include <mutex>
#include <thread>

#include "gpus.h"

namespace dpcore::gpus {
namespace {

// One at a time, and nobody else does anything then: a capture concerns the calls of all threads.
class Capturing {
 public:
  explicit Capturing(int world) : all_(world) {}
  class Turn {
   public:
    explicit Turn(Capturing& of) : of_(of) {
      of_.all_.arrive_and_wait();
      of_.one_.lock();
    }
    ~Turn() {
      of_.one_.unlock();
      of_.all_.arrive_and_wait();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Capturing& of_;
  };

 private:
  std::mutex one_;
  std::barrier<> all_;
};

void capture(const Job& job, int rank, Capturing& capturing) {
  constexpr int kReplays = 3;
  Comm comm = join(job, rank);
  const Program program(comm->device());
  auto* stream = static_cast<cudaStream_t>(program.stream());
  Tensor shared(*comm, 3000);
  Tensor ordinary(comm->device(), 700);
  const auto step = [&] {
    const auto first = all_reduce(*comm, shared, stream);
    const auto second = all_reduce(*comm, ordinary, stream);
    comm->order(first, stream);
    comm->order(second, stream);
  };
  step();  // what it needs is there from here on
  comm->device().synchronize(stream);
  cudaGraph_t graph = nullptr;
  {
    const Capturing::Turn turn(capturing);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    step();
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  }
  cudaGraphExec_t runs = nullptr;
  CHECK(cudaGraphInstantiate(&runs, graph, 0) == cudaSuccess);
  shared.fill(1.0F);
  ordinary.fill(2.0F);
  auto expected = 1.0F;
  for (int i = 0; i < kReplays; ++i) {
    CHECK(cudaGraphLaunch(runs, stream) == cudaSuccess);
    expected *= static_cast<float>(job.world);
  }
  comm->device().synchronize(stream);
  CHECK(shared.holds(expected) && ordinary.holds(2 * expected));
  step();  // and calls go on behind it
  comm->device().synchronize(stream);
  CHECK(shared.holds(expected * static_cast<float>(job.world)));
  // A graph that has just been started: the end of the communicator waits for it.
  CHECK(cudaGraphLaunch(runs, stream) == cudaSuccess);
  comm->close();
  CHECK(comm->device().is_idle(stream));
  CHECK(cudaGraphExecDestroy(runs) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
}

// Ranks that share a GPU refuse it, and the program goes on.
void capture_refused(const Job& job, int rank, Capturing& capturing) {
  Comm comm = join(job, rank);
  const Program program(comm->device());
  auto* stream = static_cast<cudaStream_t>(program.stream());
  Tensor tensor(*comm, 100);
  std::string said;
  {
    const Capturing::Turn turn(capturing);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    try {
      all_reduce(*comm, tensor, stream);
    } catch (const Unsupported& problem) {
      said = problem.what();
    }
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  }
  CHECK(said.find("can't capture this into a graph: ranks that share a GPU") != std::string::npos);
  tensor.fill(1.0F);
  comm->order(all_reduce(*comm, tensor, stream), stream);
  comm->device().synchronize(stream);
  CHECK(tensor.holds(static_cast<float>(job.world)));
  comm->close();
}

}  // namespace

void graphs(int world) {
  Capturing capturing(world);
  for (const bool apart : {true, false}) {
    fake_cuda::have_devices(apart ? world : 1);
    choose("auto", "auto");
    Job job{apart ? "graph" : "no graph", world, apart ? world : 1};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world; ++rank) {
      ranks.emplace_back([&, rank] {
        apart ? capture(job, rank, capturing) : capture_refused(job, rank, capturing);
      });
    }
    for (std::thread& rank : ranks) {
      rank.join();
    }
    nothing_is_left();
  }
}

}  // namespace dpcore::gpus
