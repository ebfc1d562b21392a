// Ranks that stay away or die, and memory that can't be handed over as it should be.
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "gpus.h"

namespace dpcore::gpus {

void a_kernel_that_waits_in_vain() {
  fake_cuda::have_devices(2);
  choose("fused", "auto");
  Job job{"late", 2, 2};
  job.timeout_s = 1.0;
  std::string said;
  std::atomic<bool> is_over{false};
  std::thread stays_away([&] {
    Comm comm = join(job, 1);
    while (!is_over) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    comm->close();
  });
  Comm comm = join(job, 0);
  {
    const Program program(comm->device());
    Tensor tensor(comm->device(), 1000);
    const auto work = all_reduce(*comm, tensor, program.stream());
    try {
      comm->wait(work, 0, nullptr);
    } catch (const Timeout& problem) {
      said = problem.what();
    }
    is_over = true;
    stays_away.join();
  }
  comm->close();
  CHECK(said.find("rank 1") != std::string::npos);
  CHECK(!fake_cuda::has_error());
}

// Of three processes one is killed between two operations: the others say so, and the memory that
// it has mapped, and its own that they have, does nobody any harm.
void a_process_is_killed(const std::string& barrier) {
  constexpr int kDies = 2;
  fake_cuda::have_devices(3);
  choose(barrier, "descriptor");
  const auto run = [&](int rank) {
    std::string said;
    {
      Comm comm = join({"killed by " + barrier, 3, 3, false}, rank);
      const Program program(comm->device());
      Tensor tensor(*comm, 300'000);
      tensor.fill(0.0F);
      try {
        for (int round = 0;; ++round) {
          if (rank == kDies && round == 5) {
            ::raise(SIGKILL);
          }
          const auto work = all_reduce(*comm, tensor, program.stream());
          if (round % 2 == 0) {
            comm->wait(work, 0, nullptr);
          }
        }
      } catch (const PeerLost& problem) {
        said = problem.what();
      }
      comm->close();
    }
    CHECK(said.find("rank 2") != std::string::npos && !fake_cuda::has_error());
  };
  const std::vector<int> statuses = statuses_of(3, run);
  CHECK(statuses[0] == 0 && statuses[1] == 0);
  CHECK(WIFSIGNALED(statuses[kDies]) && WTERMSIG(statuses[kDies]) == SIGKILL);
}

void fallbacks() {
  fake_cuda::have_devices(1);
  choose("auto", "auto");
  fake_cuda::allow(false, true);
  as_processes({"no descriptors", 2, 1, false}, "stream", "ipc");
  fake_cuda::allow(true, false);
  as_processes({"no ipc", 2, 1, false}, "stream", "descriptor");
  fake_cuda::allow(false, false);
  const auto run = [](int rank) {
    std::string said;
    try {
      join({"neither", 2, 1, false}, rank);
    } catch (const Unsupported& problem) {
      said = problem.what();
    }
    CHECK(said.find("the ranks can't map memory of each other's devices") != std::string::npos);
    nothing_is_left();
  };
  for (const int status : statuses_of(2, run)) {
    CHECK(status == 0);
  }
}

}  // namespace dpcore::gpus
