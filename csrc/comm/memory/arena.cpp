// Growth: small allocations share a step, so that many cost few system calls; a large one takes
// what it needs and no more. fallocate() takes the pages at once: a machine without
// memory says so here, as an error, and not later as a SIGBUS in the middle of a transfer.
#include "comm/memory/arena.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "comm/base/fault.h"

namespace dpcore {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGrowthStep = size_t{1} << 20;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// AMD's first-level caches guess by a hash of the bits 12 to 27 of an address which of their lines
// is meant. Ranks use the same offset of several arenas at once, and if these began kAlike or a
// multiple of it apart, each access would throw out the line of the one before: an all-reduce
// within the caches took four times as long (docs/decisions/0047). So each mapping of a process
// begins elsewhere in kAlike, by huge pages.
constexpr size_t kAlike = size_t{1} << 28;
constexpr size_t kApart = size_t{2} << 20;

void* map_apart(int fd, size_t reserve) {
  static std::atomic<size_t> mappings{0};
  const size_t all = reserve + kAlike;
  void* room = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    return MAP_FAILED;
  }
  auto* begin = static_cast<std::byte*>(room);
  const size_t place = mappings.fetch_add(1, std::memory_order_relaxed) * kApart;
  const size_t skipped = (place - reinterpret_cast<uintptr_t>(begin)) % kAlike;
  void* at = mmap(begin + skipped, reserve, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
  if (at == MAP_FAILED) {
    munmap(room, all);
    return at;
  }
  if (skipped > 0) {
    munmap(begin, skipped);
  }
  if (skipped < kAlike) {
    munmap(begin + skipped + reserve, kAlike - skipped);
  }
  return at;
}

std::byte* map_shared(int fd, size_t reserve) {
  void* at = map_apart(fd, reserve);
  if (at == MAP_FAILED) {
    throw Error("arena: cannot map " + std::to_string(reserve >> 30) + " GiB of addresses (" +
                std::strerror(errno) +
                "); a limit on address space (ulimit -v) calls for DPCORE_ARENA_MAX=<GiB>");
  }
  // For a core dump the kernel looks at every page, also where there is none. That takes minutes,
  // and until it is done the process is not gone and its peers wait.
  madvise(at, reserve, MADV_DONTDUMP);
  return static_cast<std::byte*>(at);
}

// Older kernels give up at any signal that this thread may handle (a child's end, a timer's), so
// none comes meanwhile. Returns an errno.
int allocate_undisturbed(int fd, size_t from, size_t bytes) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int problem = EINTR;
  while (problem == EINTR) {  // a debugger that attaches
    problem = posix_fallocate(fd, static_cast<off_t>(from), static_cast<off_t>(bytes));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return problem;
}

}  // namespace

size_t Arena::default_reserve() {
  size_t gib = 256;
  if (const char* text = std::getenv("DPCORE_ARENA_MAX")) {
    gib = std::max<size_t>(1, std::strtoull(text, nullptr, 10));
  }
  return gib << 30;
}

std::shared_ptr<Arena> Arena::create(int rank_for_messages, size_t reserve) {
  std::shared_ptr<Arena> arena(new Arena);
  arena->rank_ = rank_for_messages;
  arena->fd_ = Descriptor(
      static_cast<int>(syscall(SYS_memfd_create, "dpcore-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!arena->fd_) {
    throw Error(std::string("arena: memfd_create failed: ") + std::strerror(errno) +
                "; check `ulimit -n`");
  }
  fcntl(arena->fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL);
  arena->base_ = map_shared(arena->fd(), reserve);
  arena->reserve_ = reserve;
  fork_guard::add_mapping(arena->base_, reserve, arena->fd());
  return arena;
}

Arena::~Arena() {
  if (base_) {
    fork_guard::remove_mapping(base_);
    munmap(base_, reserve_);
  }
}

std::shared_ptr<std::byte> Arena::allocate(size_t bytes, size_t alignment) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > reserve_) {  // before it is rounded up, perhaps around 2^64
    throw no_addresses(bytes);
  }
  bytes = round_up(std::max<size_t>(bytes, 1), 64);
  if (bytes >= kPage) {
    alignment = std::max(alignment, kPage);
  }
  auto offset = blocks_.allocate(bytes, alignment);
  if (!offset) {
    grow_for(bytes, alignment);
    offset = blocks_.allocate(bytes, alignment);
  }
  return {base_ + *offset,
          [self = shared_from_this(), at = *offset](std::byte*) { self->release(at); }};
}

void Arena::grow_for(size_t bytes, size_t alignment) {
  const size_t old_size = blocks_.size();
  const size_t shared_step = bytes < kGrowthStep ? old_size + kGrowthStep : 0;
  const size_t new_size =
      round_up(std::max(blocks_.size_for(bytes, alignment), shared_step), kPage);
  if (new_size > reserve_) {
    throw no_addresses(bytes);
  }
  fault::reach(fault::Point::grow, rank_, 0);
  const int problem = allocate_undisturbed(fd(), old_size, new_size - old_size);
  if (problem != 0) {
    throw Error("arena of rank " + std::to_string(rank_) + ": no memory to grow from " +
                std::to_string(old_size) + " to " + std::to_string(new_size) + " bytes (" +
                std::strerror(problem) + "); use smaller buffers or raise the memory limit");
  }
  blocks_.grow(new_size);
}

Error Arena::no_addresses(size_t bytes) const {
  return Error("arena of rank " + std::to_string(rank_) + ": " + std::to_string(bytes) +
               " bytes asked for with " + std::to_string(blocks_.size()) + " in use, but only " +
               std::to_string(reserve_) + " bytes of addresses; set DPCORE_ARENA_MAX=<GiB>");
}

void Arena::release(size_t offset) {
  if (origin_.is_forked_copy()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reuse_) {
    blocks_.free(offset);
  }
}

void Arena::stop_reuse() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reuse_ = false;
}

size_t Arena::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return blocks_.size();
}

size_t Arena::used_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return blocks_.used_bytes();
}

std::shared_ptr<ArenaView> ArenaView::map(Descriptor fd, size_t reserve) {
  std::shared_ptr<ArenaView> view(new ArenaView);
  view->base_ = map_shared(fd.get(), reserve);
  view->mapped_ = reserve;
  // A forked child never uses a peer's memory: it gets nothing there, not a private copy.
  fork_guard::add_mapping(view->base_, reserve, fork_guard::kDropMapping);
  return view;
}

std::shared_ptr<ArenaView> ArenaView::of(std::shared_ptr<Arena> arena) {
  std::shared_ptr<ArenaView> view(new ArenaView);
  view->base_ = arena->base();
  view->local_ = std::move(arena);
  return view;
}

ArenaView::~ArenaView() {
  if (mapped_ > 0) {
    fork_guard::remove_mapping(base_);
    munmap(base_, mapped_);
  }
}

}  // namespace dpcore
