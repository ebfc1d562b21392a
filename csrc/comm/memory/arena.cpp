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
#include <cstring>

#include "comm/base/fault.h"

namespace dpcore {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGrowthStep = size_t{1} << 20;
constexpr size_t kLargeHole = size_t{8} << 20;
constexpr size_t kFirstSegment = size_t{64} << 20;
constexpr size_t kMost = size_t{1} << 46;  // half of what a process can address

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// AMD's first-level caches guess by a hash of the bits 12 to 27 of an address which of their lines
// is meant. Ranks use the same offset of several arenas at once, and if these began kAlike or a
// multiple of it apart, each access would throw out the line of the one before: an all-reduce
// within the caches took four times as long (docs/decisions/0047). So each mapping of a process
// begins elsewhere in kAlike, by huge pages.
constexpr size_t kAlike = size_t{1} << 28;
constexpr size_t kApart = size_t{2} << 20;

// Addresses for `bytes` at a place that is apart, with a page before them.
std::byte* room_apart(size_t bytes) {
  static std::atomic<size_t> mappings{0};
  const size_t all = kPage + bytes + kAlike;
  void* room = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    return nullptr;
  }
  auto* begin = static_cast<std::byte*>(room);
  const size_t place = mappings.fetch_add(1, std::memory_order_relaxed) * kApart;
  const size_t skipped = (place - reinterpret_cast<uintptr_t>(begin + kPage)) % kAlike;
  if (skipped > 0) {
    munmap(begin, skipped);
  }
  if (skipped < kAlike) {
    munmap(begin + skipped + kPage + bytes, kAlike - skipped);
  }
  return begin + skipped + kPage;
}

// Maps `bytes` of an arena's file: by its descriptor from the beginning, or what follows a mapping
// that ends at `before`. The kernel makes a second mapping of the last page there, which may be
// longer than the first; the page itself is not needed twice.
std::byte* map_apart(int fd, std::byte* before, size_t bytes) {
  std::byte* at = room_apart(bytes);
  void* mapped = MAP_FAILED;
  if (at != nullptr) {
    mapped =
        before == nullptr
            ? mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0)
            : mremap(before - kPage, 0, kPage + bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at - kPage);
  }
  if (mapped == MAP_FAILED) {
    const int problem = errno;
    if (at != nullptr) {
      munmap(at - kPage, kPage + bytes);
    }
    throw Error("arena: cannot map " + std::to_string(bytes >> 20) + " MiB of addresses (" +
                std::strerror(problem) +
                "); raise the limit on address space (ulimit -v), or use smaller buffers");
  }
  munmap(at - kPage, kPage);
  // For a core dump the kernel looks at every page, also where there is none. That takes minutes,
  // and until it is done the process is not gone and its peers wait.
  madvise(at, bytes, MADV_DONTDUMP);
  return at;
}

void unmap(std::byte* base, size_t bytes) {
  fork_guard::remove_mapping(base);
  munmap(base, bytes);
}

// Of an arena's file; what is mapped there reads as zeros afterwards.
void give_back(std::byte* begin, size_t bytes) {
  std::byte* const first = begin + (round_up(reinterpret_cast<uintptr_t>(begin), kPage) -
                                    reinterpret_cast<uintptr_t>(begin));
  const auto whole =
      static_cast<size_t>(std::max<ptrdiff_t>(begin + bytes - first, 0)) / kPage * kPage;
  if (whole > 0) {
    madvise(first, whole, MADV_REMOVE);
  }
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

std::shared_ptr<Arena> Arena::create(int rank_for_messages) {
  std::shared_ptr<Arena> arena(new Arena);
  arena->rank_ = rank_for_messages;
  arena->fd_ = Descriptor(
      static_cast<int>(syscall(SYS_memfd_create, "dpcore-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!arena->fd_) {
    throw Error(std::string("arena: memfd_create failed: ") + std::strerror(errno) +
                "; check `ulimit -n`");
  }
  fcntl(arena->fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL);
  const std::lock_guard<std::mutex> lock(arena->mutex_);
  arena->add_segment(sizeof(ArenaHeader));
  Segment& first = arena->segments_[0];
  arena->grow(first, sizeof(ArenaHeader), 64);
  first.blocks.allocate(sizeof(ArenaHeader), 64);  // at its beginning, for good
  arena->show(first);
  return arena;
}

Arena::~Arena() {
  for (uint32_t i = 0; i < count_.load(std::memory_order_relaxed); ++i) {
    unmap(segments_[i].base, segments_[i].bytes());
  }
}

std::byte* Arena::at(uint64_t offset) const {
  uint32_t i = 0;
  while (offset >= segments_[i].end) {
    ++i;
  }
  return segments_[i].base + (offset - segments_[i].begin);
}

std::shared_ptr<std::byte> Arena::allocate(size_t bytes, size_t alignment) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > kMost) {  // before it is rounded up, perhaps around 2^64
    throw no_addresses(bytes);
  }
  bytes = round_up(std::max<size_t>(bytes, 1), 64);
  if (bytes >= kPage) {
    alignment = std::max(alignment, kPage);
  }
  const uint32_t count = count_.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < count; ++i) {
    if (const auto offset = segments_[i].blocks.allocate(bytes, alignment)) {
      return block(i, *offset, bytes);
    }
  }
  if (bytes >= kLargeHole) {
    empty_holes();
  }
  uint32_t i = 0;
  while (i < count && segments_[i].blocks.size_for(bytes, alignment) > segments_[i].bytes()) {
    ++i;
  }
  if (i == count) {
    add_segment(bytes);
  }
  grow(segments_[i], bytes, alignment);
  return block(i, segments_[i].blocks.allocate(bytes, alignment).value(), bytes);
}

std::shared_ptr<std::byte> Arena::block(uint32_t segment, size_t offset, size_t bytes) {
  try {
    refill(segments_[segment], offset, bytes);
  } catch (const Error&) {
    segments_[segment].blocks.free(offset);
    throw;
  }
  return {segments_[segment].base + offset, [self = shared_from_this(), segment, offset](
                                                std::byte*) { self->release(segment, offset); }};
}

// Behind the last one; peers may know of it when there is a first block in it.
void Arena::add_segment(size_t bytes) {
  const uint32_t count = count_.load(std::memory_order_relaxed);
  const size_t begin = count == 0 ? 0 : segments_[count - 1].end;
  const size_t room = round_up(std::max({bytes, begin, kFirstSegment}), kApart);
  if (count == kMostSegments || begin + room > kMost) {
    throw no_addresses(bytes);
  }
  Segment& segment = segments_[count];
  std::byte* before =
      count == 0 ? nullptr : segments_[count - 1].base + segments_[count - 1].bytes();
  segment.base = map_apart(fd(), before, room);
  segment.begin = begin;
  segment.end = begin + room;
  fork_guard::add_mapping(segment.base, room, fd(), begin);
  count_.store(count + 1, std::memory_order_release);
  if (count > 0) {
    show(segment);
  }
}

void Arena::show(const Segment& segment) {
  SegmentTable& table = header().segments;
  const auto i = static_cast<uint32_t>(&segment - segments_.data());
  table.ends[i] = segment.end;
  table.count.store(i + 1, std::memory_order_release);
}

void Arena::grow(Segment& segment, size_t bytes, size_t alignment) {
  const size_t old_size = segment.blocks.size();
  const size_t shared_step = bytes < kGrowthStep ? old_size + kGrowthStep : 0;
  const size_t wanted = std::max(segment.blocks.size_for(bytes, alignment), shared_step);
  const size_t new_size = std::min(round_up(wanted, kPage), segment.bytes());
  fault::reach(fault::Point::grow, rank_, 0);
  get_memory(segment, old_size, new_size);
  segment.blocks.grow(new_size);
}

void Arena::get_memory(const Segment& segment, size_t from, size_t to) {
  if (const int problem = allocate_undisturbed(fd(), segment.begin + from, to - from)) {
    throw Error("arena of rank " + std::to_string(rank_) + ": no memory to grow from " +
                std::to_string(from) + " to " + std::to_string(to) + " bytes (" +
                std::strerror(problem) + "); use smaller buffers or raise the memory limit");
  }
}

// ---- holes that are empty --------------------------------------------------------------------

void Arena::empty_holes() {
  for (uint32_t i = 0; i < count_.load(std::memory_order_relaxed); ++i) {
    Segment& segment = segments_[i];
    for (const auto& [offset, bytes] : segment.blocks.holes()) {
      if (bytes >= kLargeHole) {
        give_back(segment.base + offset, bytes);
        segment.empty.erase(segment.empty.lower_bound(offset),
                            segment.empty.lower_bound(offset + bytes));
        segment.empty.emplace(offset, bytes);
      }
    }
  }
}

// What of a block went back to the machine before has memory again afterwards.
void Arena::refill(Segment& segment, size_t offset, size_t bytes) {
  const size_t end = offset + bytes;
  for (auto range = segment.empty.begin(); range != segment.empty.end();) {
    const auto [at, length] = *range;
    if (at >= end || at + length <= offset) {
      ++range;
      continue;
    }
    get_memory(segment, std::max(at, offset), std::min(at + length, end));
    range = segment.empty.erase(range);
    if (at < offset) {
      segment.empty.emplace(at, offset - at);
    }
    if (end < at + length) {
      segment.empty.emplace(end, at + length - end);
    }
  }
}

Error Arena::no_addresses(size_t bytes) const {
  return Error("arena of rank " + std::to_string(rank_) + ": " + std::to_string(bytes) +
               " bytes asked for with " + std::to_string(sum_of(&ArenaBlocks::size)) +
               " in use: more than a process can address");
}

void Arena::release(uint32_t segment, size_t offset) {
  if (origin_.is_forked_copy()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reuse_) {
    segments_[segment].blocks.free(offset);
  }
}

void Arena::stop_reuse() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reuse_ = false;
}

size_t Arena::sum_of(size_t (ArenaBlocks::*what)() const) const {
  size_t sum = 0;
  for (uint32_t i = 0; i < count_.load(std::memory_order_relaxed); ++i) {
    sum += (segments_[i].blocks.*what)();
  }
  return sum;
}

size_t Arena::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sum_of(&ArenaBlocks::size);
}

size_t Arena::used_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sum_of(&ArenaBlocks::used_bytes);
}

std::shared_ptr<ArenaView> ArenaView::map(const Descriptor& fd, size_t first_bytes) {
  std::shared_ptr<ArenaView> view(new ArenaView);
  view->base_ = map_apart(fd.get(), nullptr, first_bytes);
  view->first_bytes_ = first_bytes;
  // A forked child never uses a peer's memory: it gets nothing there, not a private copy.
  fork_guard::add_mapping(view->base_, first_bytes, fork_guard::kDropMapping);
  return view;
}

std::shared_ptr<ArenaView> ArenaView::of(std::shared_ptr<Arena> arena) {
  std::shared_ptr<ArenaView> view(new ArenaView);
  view->base_ = arena->at(0);
  view->first_bytes_ = arena->first_bytes();
  view->local_ = std::move(arena);
  return view;
}

std::byte* ArenaView::at_later_segment(uint64_t offset) const {
  if (local_) {
    return local_->at(offset);
  }
  const SegmentTable& table = header().segments;
  const uint32_t count = std::min(table.count.load(std::memory_order_acquire), kMostSegments);
  for (uint32_t i = 1; i < count; ++i) {
    if (offset < table.ends[i]) {
      std::byte* base = later_[i].base.load(std::memory_order_acquire);
      return (base != nullptr ? base : map_up_to(i)) + (offset - table.ends[i - 1]);
    }
  }
  throw Error("arena: offset " + std::to_string(offset) + " of another rank lies in no segment");
}

// Each mapping is made from the one before.
std::byte* ArenaView::map_up_to(uint32_t segment) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t* ends = header().segments.ends;
  std::byte* end = base_ + first_bytes_;
  for (uint32_t i = 1; i <= segment; ++i) {
    Mapped& mapped = later_[i];
    std::byte* base = mapped.base.load(std::memory_order_relaxed);
    if (base == nullptr) {
      mapped.bytes = ends[i] - ends[i - 1];
      base = map_apart(-1, end, mapped.bytes);
      fork_guard::add_mapping(base, mapped.bytes, fork_guard::kDropMapping);
      mapped.base.store(base, std::memory_order_release);
    }
    end = base + mapped.bytes;
  }
  return later_[segment].base.load(std::memory_order_relaxed);
}

void ArenaView::drop_pages(size_t kept) const {
  if (local_) {
    return;
  }
  give_back(base_ + kept, first_bytes_ - kept);
  const SegmentTable& table = header().segments;
  const uint32_t count = std::min(table.count.load(std::memory_order_acquire), kMostSegments);
  for (uint32_t i = 1; i < count; ++i) {
    std::byte* const base = map_up_to(i);
    give_back(base, later_[i].bytes);
  }
}

ArenaView::~ArenaView() {
  if (local_ || base_ == nullptr) {
    return;
  }
  for (const Mapped& mapped : later_) {
    if (std::byte* base = mapped.base.load(std::memory_order_relaxed)) {
      unmap(base, mapped.bytes);
    }
  }
  unmap(base_, first_bytes_);
}

}  // namespace dpcore
