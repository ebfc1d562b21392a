// See memory_choice.h.
#include "cuda/device/memory_choice.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "comm/base/error.h"

namespace dpcore {
namespace {

struct Way {
  MemoryKind kind;
  std::string_view name;
  const char* missing;  // what a rank lacks that can't go it
  bool (*is_open)(const MemorySupport& rank, uint64_t process);
};

// The best one first: within a process nothing has to be handed over.
constexpr std::array kWays = {
    Way{MemoryKind::address, "address", "is another process",
        [](const MemorySupport& rank, uint64_t process) { return rank.process == process; }},
    Way{MemoryKind::descriptor, "descriptor", "has no device memory behind file descriptors (VMM)",
        [](const MemorySupport& rank, uint64_t) { return rank.descriptors; }},
    Way{MemoryKind::ipc, "ipc", "has no cudaIpc (unified addressing is needed)",
        [](const MemorySupport& rank, uint64_t) { return rank.ipc; }}};

}  // namespace

uint64_t process_mark() {
  static std::mutex mutex;
  static uint64_t mark = 0;
  static pid_t drawn_in = 0;  // a forked child has another number than its parent, wherever it is
  const std::lock_guard<std::mutex> lock(mutex);
  while (mark == 0 || drawn_in != getpid()) {
    if (getrandom(&mark, sizeof(mark), 0) != static_cast<ssize_t>(sizeof(mark))) {
      throw Error("the system gives no random numbers");
    }
    drawn_in = getpid();
  }
  return mark;
}

std::string_view name_of(MemoryKind kind) {
  return std::find_if(kWays.begin(), kWays.end(), [&](const Way& way) { return way.kind == kind; })
      ->name;
}

MemoryKind choose_memory(std::span<const MemorySupport> ranks, const std::string& wish) {
  const uint64_t process = ranks.front().process;
  std::string missing;
  for (const Way& way : kWays) {
    if (!wish.empty() && wish != way.name) {
      continue;
    }
    const auto lacks = std::find_if(ranks.begin(), ranks.end(), [&](const MemorySupport& rank) {
      return !way.is_open(rank, process);
    });
    if (lacks == ranks.end()) {
      return way.kind;
    }
    missing += (missing.empty() ? "" : ", ") + std::string("rank ") +
               std::to_string(lacks - ranks.begin()) + " " + way.missing;
  }
  if (missing.empty()) {
    throw Unsupported("DPCORE_CUDA_MEMORY=" + wish +
                      ": choose from address, ipc and descriptor, or leave it out");
  }
  throw Unsupported("the ranks can't map memory of each other's devices (" + missing + ")" +
                    (wish.empty() ? ": use backend='nccl'" : ": leave DPCORE_CUDA_MEMORY out"));
}

}  // namespace dpcore
