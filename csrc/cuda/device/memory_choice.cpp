// See memory_choice.h.
#include "cuda/device/memory_choice.h"

#include <algorithm>
#include <array>

#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"address", "ipc", "descriptor"};

bool can(const MemorySupport& rank, MemoryKind kind, uint64_t process) {
  switch (kind) {
    case MemoryKind::address:
      return rank.process == process;
    case MemoryKind::ipc:
      return rank.ipc;
    case MemoryKind::descriptor:
      return rank.descriptors;
  }
  return false;
}

std::string what_is_missing(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::address:
      return "is another process";
    case MemoryKind::ipc:
      return "has no cudaIpc (unified addressing is needed)";
    case MemoryKind::descriptor:
      return "has no device memory behind file descriptors (VMM)";
  }
  return "";
}

}  // namespace

std::string_view name_of(MemoryKind kind) { return kNames[static_cast<size_t>(kind)]; }

MemoryKind choose_memory(std::span<const MemorySupport> ranks, const std::string& wish) {
  const uint64_t process = ranks.front().process;
  const auto first_without = [&](MemoryKind kind) {
    return std::find_if(ranks.begin(), ranks.end(),
                        [&](const MemorySupport& rank) { return !can(rank, kind, process); });
  };
  // Within a process nothing has to be handed over.
  constexpr std::array kOrder = {MemoryKind::address, MemoryKind::descriptor, MemoryKind::ipc};
  std::string missing;
  for (const MemoryKind kind : kOrder) {
    if (!wish.empty() && wish != name_of(kind)) {
      continue;
    }
    const auto lacks = first_without(kind);
    if (lacks == ranks.end()) {
      return kind;
    }
    missing += (missing.empty() ? "" : ", ") + std::string("rank ") +
               std::to_string(lacks - ranks.begin()) + " " + what_is_missing(kind);
  }
  if (missing.empty()) {
    throw Unsupported("DPCORE_CUDA_MEMORY=" + wish +
                      ": choose of address, ipc and descriptor, or leave it out");
  }
  throw Unsupported("the ranks can't map memory of each other's devices (" + missing + ")" +
                    (wish.empty() ? ": use backend='nccl'" : ": leave DPCORE_CUDA_MEMORY out"));
}

}  // namespace dpcore
