// Reading a peer's ordinary memory: one copy, made by the kernel (process_vm_readv), where a stage
// takes two.
//
// Ownership: the bytes belong to the rank that posted their address. It keeps them until every
// reader has finished the operation. A reader that is done asks whether the owner is still in the
// operation; if it is not, what was read does not count. No rank writes to a peer's ordinary
// memory: a late read can be thrown away, but a rank that has given up may have freed what a late
// write would hit.
//
// The kernel allows it where one process may trace the other: the same user, no seccomp filter
// against it, Yama's ptrace_scope 0 or the capability. dpcore asks for no more than that
// (PR_SET_PTRACER). Ranks find out when they meet; where one of them may not, all go by the stage.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpcore {

// A process, and a random number that it has at an address. The process number may be another
// container's, or that of a process that came later: only the right one has the token there.
struct ReadableProcess {
  int32_t process = 0;
  uint64_t token_address = 0;
  uint64_t token = 0;
};

bool can_read(const ReadableProcess& owner);

// 0, or the kernel's reason (errno) why not all of it was read: ESRCH when the process has ended.
int read_memory_of(const ReadableProcess& owner, std::byte* to, uint64_t address, size_t bytes);

// Whether peers could read what begins here: memory of a device, mapped here, belongs to its
// driver.
bool can_be_read(const std::byte* at);

}  // namespace dpcore
