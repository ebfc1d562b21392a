// The table and the three atfork handlers. See fork_guard.h.
#include "comm/base/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "comm/base/error.h"
#include "comm/base/spin_lock.h"

namespace dpcore::fork_guard {
namespace {

struct Mapping {
  void* base = nullptr;
  size_t bytes = 0;
  int fd = kDropMapping;
  size_t offset = 0;
};

constexpr size_t kMaxMappings = 8192;
constexpr size_t kMaxDescriptors = 8192;

std::array<Mapping, kMaxMappings> mappings;
std::array<int, kMaxDescriptors> descriptors;  // fd + 1, 0 = free
SpinLock table_lock;

void lock() { table_lock.lock(); }
void unlock() { table_lock.unlock(); }

// First nothing is there, then what the file has: a system that counts what might be written
// (vm.overcommit_memory=2) has no room for all the addresses, and perhaps not even for the file. A
// fault there is better than a child that writes to its parent's memory.
void make_private(const Mapping& mapping) {
  constexpr int kInPlace = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
  mmap(mapping.base, mapping.bytes, PROT_NONE, kInPlace | MAP_ANONYMOUS, -1, 0);
  struct stat file{};
  const bool has_file = mapping.fd != kDropMapping && fstat(mapping.fd, &file) == 0;
  if (has_file && static_cast<size_t>(file.st_size) > mapping.offset) {
    const size_t bytes = std::min(mapping.bytes, file.st_size - mapping.offset);
    mmap(mapping.base, bytes, PROT_READ | PROT_WRITE, kInPlace, mapping.fd,
         static_cast<off_t>(mapping.offset));
  }
}

void in_child() {
  for (Mapping& mapping : mappings) {
    if (mapping.base != nullptr) {
      make_private(mapping);
      madvise(mapping.base, mapping.bytes, MADV_DONTDUMP);  // as before (arena.cpp)
    }
  }
  // The number stays taken, by something harmless, until the copy of its owner closes it: else
  // the destructor of an inherited object could close what the child opened in its place.
  const int harmless = eventfd(0, EFD_CLOEXEC);
  for (int& entry : descriptors) {
    if (entry != 0 && (harmless < 0 || dup3(harmless, entry - 1, O_CLOEXEC) < 0)) {
      close(entry - 1);
      entry = 0;
    }
  }
  if (harmless >= 0) {
    close(harmless);
  }
  forks.fetch_add(1);
  unlock();
}

void install_once() {
  static const int installed = pthread_atfork(lock, unlock, in_child);
  (void)installed;
}

}  // namespace

void add_mapping(void* base, size_t bytes, int fd, size_t offset) {
  install_once();
  const std::lock_guard<SpinLock> lock(table_lock);
  for (Mapping& mapping : mappings) {
    if (mapping.base == nullptr) {
      mapping = {base, bytes, fd, offset};
      return;
    }
  }
  throw Error("more than " + std::to_string(kMaxMappings) +
              " arenas are mapped in this process; finalize communicators that are done");
}

void remove_mapping(void* base) {
  const std::lock_guard<SpinLock> lock(table_lock);
  for (Mapping& mapping : mappings) {
    if (mapping.base == base) {
      mapping = {};
      return;
    }
  }
}

void add_descriptor(int fd) {
  install_once();
  const std::lock_guard<SpinLock> lock(table_lock);
  for (int& entry : descriptors) {
    if (entry == 0) {
      entry = fd + 1;
      return;
    }
  }
  throw Error("dpcore holds " + std::to_string(kMaxDescriptors) +
              " files and sockets in this process, the most that it can; close communicators that "
              "are not needed any more (comm.close())");
}

void close_descriptor(int fd) {
  const std::lock_guard<SpinLock> lock(table_lock);
  const auto entry = std::find(descriptors.begin(), descriptors.end(), fd + 1);
  if (entry != descriptors.end()) {
    close(fd);  // a child forked before it is gone has to know of it
    *entry = 0;
  }
}

}  // namespace dpcore::fork_guard
