// Ranks as threads and as processes: collectives, messages, groups, traces, and a steady state.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "gpus.h"

namespace dpcore::gpus {
namespace {

// cudaFree waits for every stream of its GPU. Where ranks share one, a stream may hold an operation
// that waits for the very rank that frees: so nobody goes on before all have freed their tensors.
void all_have_freed(const MappedCommunicator& comm) {
  Request barrier;
  barrier.collective = Collective::barrier;
  comm.control()->run(std::move(barrier), "", nullptr);
}

void collectives(MappedCommunicator& comm, Device::Stream stream, unsigned seed) {
  constexpr const char* kAlgorithms[] = {"", "", "ring/moves", "one_shot/moves"};
  const auto sum = static_cast<float>(comm.world() * (comm.world() + 1)) / 2;
  std::mt19937 dice(seed);  // the same on all ranks
  for (int round = 0; round < 12; ++round) {
    const size_t count = 1 + dice() % (round % 4 == 0 ? 600'000 : 3000);
    const std::string algorithm = kAlgorithms[dice() % 4];
    const bool of_the_arena = dice() % 2 == 0;
    auto tensor = of_the_arena ? std::make_unique<Tensor>(comm, count)
                               : std::make_unique<Tensor>(comm.device(), count);
    tensor->fill(static_cast<float>(comm.rank() + 1));
    const auto work = all_reduce(comm, *tensor, stream, algorithm);
    if (dice() % 2 == 0) {
      comm.wait(work, 0, nullptr);
    } else {
      comm.order(work, stream);
      comm.device().synchronize(stream);
    }
    CHECK(tensor->holds(sum));
    CHECK(!fake_cuda::has_error());
    tensor.reset();
    all_have_freed(comm);
  }
}

// What was called between the two, beside work.
std::string made_between(const std::map<std::string, uint64_t>& before,
                         const std::map<std::string, uint64_t>& after) {
  static const std::set<std::string> kWork = {
      "<<<>>>",          "cudaMemcpyAsync",     "cuStreamBatchMemOp",
      "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamIsCapturing",
      "cudaEventQuery",  "cudaSetDevice",       "cudaStreamSynchronize"};  // the last by the test
  std::string made;
  for (const auto& [name, count] : after) {
    const auto was = before.find(name);
    if (count > (was == before.end() ? 0 : was->second) && !kWork.contains(name)) {
      made += name + " ";
    }
  }
  return made;
}

// What is there is used again: a call asks the device for nothing and waits for nothing, however
// late the thread is that looks after works. Processes that share a GPU take turns on it: there the
// program's stream waits for no event, which would keep the turn.
void nothing_is_made_in_a_steady_state(MappedCommunicator& comm, Device::Stream stream,
                                       bool waits_by_events) {
  constexpr int kRounds = 100;
  Tensor tensor(comm, 5000);
  tensor.fill(0.0F);
  std::map<std::string, uint64_t> before;
  for (int round = 0; round <= kRounds; ++round) {
    comm.order(all_reduce(comm, tensor, stream), stream);
    comm.device().synchronize(stream);
    if (round == 0) {
      before = fake_cuda::calls();
    }
  }
  const std::map<std::string, uint64_t> after = fake_cuda::calls();
  const char* const waits = "cudaStreamWaitEvent";  // the communicator's stream for the program's
  CHECK(after.at(waits) - before.at(waits) == (waits_by_events ? 2 * kRounds : kRounds));
  const std::string made = made_between(before, after);
  if (!made.empty()) {
    std::fprintf(stderr, "after the first call: %s\n", made.c_str());
  }
  CHECK(made.empty());
}

void messages(MappedCommunicator& comm, Device::Stream stream) {
  Tensor sent(comm.device(), 70'000);
  Tensor got(comm.device(), 70'000);
  sent.fill(static_cast<float>(comm.rank()));
  const int right = (comm.rank() + 1) % comm.world();
  const int left = (comm.rank() + comm.world() - 1) % comm.world();
  const size_t bytes = sent.count() * sizeof(float);
  const auto work =
      comm.submit({{true, right, sent.data(), bytes}, {false, left, got.data(), bytes}}, 0, stream);
  comm.order(work, stream);
  comm.device().synchronize(stream);
  CHECK(got.holds(static_cast<float>(left)));
}

void trace(MappedCommunicator& comm, Device::Stream stream) {
  comm.trace().start(16);
  Tensor tensor(comm.device(), 1000);
  tensor.fill(1.0F);
  comm.order(all_reduce(comm, tensor, stream), stream);
  comm.device().synchronize(stream);
  uint64_t dropped = 0;
  const auto events = comm.stop_trace(&dropped);
  CHECK(!events.empty() && dropped == 0);
  for (const TraceEvent& event : events) {
    CHECK(event.begin_ns <= event.end_ns);
  }
}

// The program's stream comes to its wait when nothing is left of the communicator.
void a_stream_that_is_late(Job job, int rank) {
  job.name += " late";
  const std::shared_ptr<Device> device = cuda_device(rank % job.gpus);
  const Program program(*device);
  const std::shared_ptr<void> page(std::aligned_alloc(kFlagAlignment, kFlagAlignment), std::free);
  auto* const gate = new (page.get()) uint32_t(0);
  const MappedPages mapped = device->map_host(gate, kFlagAlignment);
  Tensor tensor(*device, 10);
  Tensor copied(*device, 10);
  tensor.fill(1.0F);
  Comm comm = MappedCommunicator::start(meet(job, rank), device, settings_of(job));
  const auto work = all_reduce(*comm, tensor, program.stream());
  device->wait_flag(program.stream(), static_cast<uint32_t*>(mapped.on_device), 1);
  comm->order(work, program.stream());
  device->copy(program.stream(), copied.data(), tensor.data(), 10 * sizeof(float));
  std::thread opening([gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::atomic_ref<uint32_t>(*gate).store(1);
  });
  comm->close();
  comm.reset();
  opening.join();
  device->synchronize(program.stream());
  CHECK(copied.holds(static_cast<float>(job.world)));
}

void run_rank(const Job& job, int rank, const std::string& barrier, const std::string& memory) {
  CHECK(!fake_cuda::has_context());
  {
    Comm comm = join(job, rank);
    CHECK(!fake_cuda::has_context() && !fake_cuda::has_error());
    const std::string description = comm->describe();
    if (barrier != "auto") {
      CHECK(description.ends_with("barrier: " + barrier));
    }
    if (memory != "auto") {
      CHECK(description.find("(" + memory + ")") != std::string::npos);
    }
    const Program program(comm->device());
    collectives(*comm, program.stream(), static_cast<unsigned>(job.world));
    messages(*comm, program.stream());
    all_have_freed(*comm);
    trace(*comm, program.stream());
    all_have_freed(*comm);
    if (!job.threads) {
      nothing_is_made_in_a_steady_state(*comm, program.stream(),
                                        description.ends_with("barrier: fused"));
    }
    const auto part = comm->split(rank % 2, rank);
    CHECK(part != nullptr);
    Tensor one(comm->device(), 10);
    one.fill(1.0F);
    const auto inner = std::dynamic_pointer_cast<MappedCommunicator>(part);
    inner->order(all_reduce(*inner, one, program.stream()), program.stream());
    comm->device().synchronize(program.stream());
    CHECK(one.holds(static_cast<float>(inner->world())));
    part->close();
    comm->close();
  }
  if (!job.threads) {
    a_stream_that_is_late(job, rank);
  }
  CHECK(!fake_cuda::has_error());
}

}  // namespace

void as_threads(const Job& job, const std::string& barrier, const std::string& memory) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < job.world; ++rank) {
    ranks.emplace_back([&, rank] { run_rank(job, rank, barrier, memory); });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  nothing_is_left();
}

void as_processes(const Job& job, const std::string& barrier, const std::string& memory) {
  const auto run = [&](int rank) {
    run_rank(job, rank, barrier, memory);
    nothing_is_left();
  };
  for (const int status : statuses_of(job.world, run)) {
    CHECK(status == 0);
  }
}

}  // namespace dpcore::gpus
