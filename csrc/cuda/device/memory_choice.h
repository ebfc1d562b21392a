// Chooses how ranks of a host access memory of each other's devices.
//
//   descriptor  physical memory behind a file descriptor that is handed over like the host's arena:
//               it lives as long as a rank has it mapped, so no other can pull it away (CUDA: VMM)
//   ipc         a handle of 64 bytes (cudaIpc): where descriptors can't be handed over. Its owner
//               must outlive the ranks that have it open
//   address     the address itself, where all ranks are threads of one process
//
// The choice is a pure function of what every rank can do, the same on all of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace dpcore {

// Which process this is, among all of the host. Numbers of processes do not say it: in containers
// each of two processes may be number 17. Drawn at random when it is first asked for; a forked
// child draws anew. Throws Error where the system gives no random numbers.
uint64_t process_mark();

enum class MemoryKind : uint8_t { address, ipc, descriptor };

std::string_view name_of(MemoryKind kind);

struct MemorySupport {
  uint64_t process = 0;  // process_mark()
  bool descriptors = false;
  bool ipc = false;
};

// `wish`: empty, or the name of one (DPCORE_CUDA_MEMORY). Throws Unsupported, naming the rank that
// lacks it.
MemoryKind choose_memory(std::span<const MemorySupport> ranks, const std::string& wish);

}  // namespace dpcore
