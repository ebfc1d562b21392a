// The token is read in the same call as the data, so no process that came later is taken for the
// owner, and no rank has to ask whether the owner lives.
#include "comm/memory/peer_memory.h"

#include <sys/mman.h>
#include <sys/uio.h>

#include <cerrno>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older ones say that they do not know it
#endif

namespace dpcore {
namespace {

// Bytes that were read, -1 with errno: ESRCH also when it is another process.
ssize_t read_some(const ReadableProcess& owner, std::byte* to, uint64_t address, size_t bytes) {
  uint64_t token = 0;
  const iovec here[] = {{&token, sizeof(token)}, {to, bytes}};
  const iovec there[] = {{reinterpret_cast<void*>(owner.token_address), sizeof(token)},
                         {reinterpret_cast<void*>(address), bytes}};
  const ssize_t all = process_vm_readv(owner.process, here, 2, there, 2, 0);
  if (all >= 0 && (all < ssize_t{sizeof(token)} || token != owner.token)) {
    errno = ESRCH;
    return -1;
  }
  return all < 0 ? all : all - ssize_t{sizeof(token)};
}

}  // namespace

bool can_read(const ReadableProcess& owner) {
  std::byte byte{};
  return owner.token != 0 && read_some(owner, &byte, owner.token_address, 1) == 1;
}

int read_memory_of(const ReadableProcess& owner, std::byte* to, uint64_t address, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t more = read_some(owner, to + done, address + done, bytes - done);
    if (more > 0) {
      done += static_cast<size_t>(more);
    } else if (more == 0) {
      return EFAULT;  // the token was read, and not a byte of the data
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

bool can_be_read(const std::byte* at) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t page = reinterpret_cast<uintptr_t>(at) / kPage * kPage;
  return madvise(reinterpret_cast<void*>(page), kPage, MADV_POPULATE_READ) == 0;
}

}  // namespace dpcore
