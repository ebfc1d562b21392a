// The part for GPUs as it is compiled for GPUs, over the stand-in for CUDA: devices, their memory
// handed from rank to rank in every way, ranks as threads and as processes that share a GPU or have
// one each, collectives, graphs, and what is left behind.
//
//   gpus device             calls of Device, one by one
//   gpus threads RANKS      of one process
//   gpus processes RANKS    where RANKS are WORLD GPUS BARRIER MEMORY
//   gpus graph WORLD        a captured step, replayed
//   gpus nccl WORLD         NCCL's stand-in ($DPCORE_NCCL_LIBRARY)
//   gpus late               a kernel that waits in vain
//   gpus killed BARRIER     a process ends in the middle
//   gpus fallbacks          where memory goes if refused
//
// MEMORY may be "auto". Everything is asked for by what the program does, too: it writes and reads
// memory of devices by copies only.
#include <cstdio>
#include <string>
#include <vector>

#include "gpus.h"

using namespace dpcore::gpus;

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  CHECK(!arguments.empty());
  const std::string& what = arguments[0];
  if (what == "device") {
    one_device();
  } else if (what == "threads" || what == "processes") {
    CHECK(arguments.size() == 5);
    Job job{what, std::stoi(arguments[1]), std::stoi(arguments[2]), what == "threads"};
    fake_cuda::have_devices(job.gpus);
    choose(arguments[3], arguments[4]);
    job.threads ? as_threads(job, arguments[3], arguments[4])
                : as_processes(job, arguments[3], arguments[4]);
  } else if (what == "graph") {
    graphs(std::stoi(arguments[1]));
  } else if (what == "nccl") {
    over_nccl(std::stoi(arguments[1]));
  } else if (what == "killed") {
    a_process_is_killed(arguments[1]);
  } else if (what == "late") {
    a_kernel_that_waits_in_vain();
  } else {
    CHECK(what == "fallbacks");
    fallbacks();
  }
  std::printf("%s: fine, memory of devices is %s\n", what.c_str(),
              fake_cuda::is_guarded() ? "guarded" : "not guarded");
  return 0;
}
