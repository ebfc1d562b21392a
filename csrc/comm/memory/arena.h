// Memory of one rank that the other ranks of its host map.
//
// An arena is one memfd: no name in /dev/shm, so nothing can be left behind. Its owner and its
// peers map it in segments. The first has 64 MiB of addresses, of which nothing is memory yet: the
// owner grows the file underneath (ftruncate + fallocate), and peers see that without another
// message, since a mapping may reach beyond the end of its file. Where a segment is full, another
// one follows in the file that doubles the arena, or is as large as the block that needs it. Peers
// map it when they first meet an offset in it, without asking: a mapping can be made from another
// one of the same file (mremap). So a process has addresses for a million arenas, and each of them
// is as large as memory allows. The file is sealed against shrinking, so no peer can be made to
// fault by another. When it grows for a large block, large holes that were too small for it go back
// to the machine, and get memory again when they are handed out.
//
// Ownership: the owner rank allocates and frees blocks, under a lock of its process that no
// transfer ever takes. Peers only read and write bytes of blocks that an operation names.
// Lifetime: blocks hold a reference to their arena, so a tensor may outlive the communicator
// and the endpoint; the memory goes when the last of them goes.
// After fork a child keeps its tensors' values but shares nothing (see fork_guard.h).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "comm/base/error.h"
#include "comm/base/fork_guard.h"
#include "comm/memory/arena_blocks.h"
#include "comm/memory/control.h"

namespace dpcore {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static std::shared_ptr<Arena> create(int rank_for_messages);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zero-filled the first time a range is handed out. Throws Error with the sizes when the
  // machine has no more memory to give.
  std::shared_ptr<std::byte> allocate(size_t bytes, size_t alignment = 64);

  // At offset 0. Its owner fills it in before peers may look.
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(segments_[0].base); }
  // Addresses of the first segment, which peers map at the start.
  size_t first_bytes() const { return segments_[0].bytes(); }
  int fd() const { return fd_.get(); }
  size_t size() const;
  size_t used_bytes() const;

  static constexpr size_t kNowhere = ~size_t{0};
  // The offset of [p, p + bytes) in this arena, or kNowhere.
  size_t offset_of(const void* p, size_t bytes) const {
    for (uint32_t i = 0; i < count_.load(std::memory_order_acquire); ++i) {
      const Segment& segment = segments_[i];
      const auto at = static_cast<size_t>(static_cast<const std::byte*>(p) - segment.base);
      if (at < segment.bytes() && bytes <= segment.bytes() - at) {
        return segment.begin + at;
      }
    }
    return kNowhere;
  }
  std::byte* at(uint64_t offset) const;

  // After a failed operation a peer that was stopped may still write where it was told to:
  // blocks freed from now on are never handed out again.
  void stop_reuse();

 private:
  struct Segment {
    std::byte* base = nullptr;
    size_t begin = 0;  // in the file
    size_t end = 0;
    ArenaBlocks blocks;              // by their offset in the segment
    std::map<size_t, size_t> empty;  // ranges that went back to the machine: offset -> bytes
    size_t bytes() const { return end - begin; }
  };

  Arena() = default;
  std::shared_ptr<std::byte> block(uint32_t segment, size_t offset, size_t bytes);
  void get_memory(const Segment& segment, size_t from, size_t to);
  void refill(Segment& segment, size_t offset, size_t bytes);
  void empty_holes();
  void grow(Segment& segment, size_t bytes, size_t alignment);
  void add_segment(size_t bytes);
  void show(const Segment& segment);
  Error no_addresses(size_t bytes) const;
  size_t sum_of(size_t (ArenaBlocks::*what)() const) const;
  void release(uint32_t segment, size_t offset);

  int rank_ = 0;
  Descriptor fd_;
  fork_guard::Origin origin_;
  mutable std::mutex mutex_;  // guards what is not shown yet, and the blocks
  std::array<Segment, kMostSegments> segments_;
  std::atomic<uint32_t> count_{0};
  bool reuse_ = true;
};

// A peer's arena as seen from here.
class ArenaView {
 public:
  // Maps the arena behind a descriptor received from a peer, which is not needed afterwards.
  static std::shared_ptr<ArenaView> map(const Descriptor& fd, size_t first_bytes);
  // The same for a rank that is a thread of this process.
  static std::shared_ptr<ArenaView> of(std::shared_ptr<Arena> arena);
  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  // Gives the pages behind the first `kept` bytes back to the machine, where the owner has ended:
  // its file lives as long as one rank maps it.
  void drop_pages(size_t kept) const;
  // Any thread.
  std::byte* at(uint64_t offset) const {
    return offset < first_bytes_ ? base_ + offset : at_later_segment(offset);
  }

 private:
  ArenaView() = default;
  std::byte* at_later_segment(uint64_t offset) const;
  std::byte* map_up_to(uint32_t segment) const;

  std::byte* base_ = nullptr;
  size_t first_bytes_ = 0;
  std::shared_ptr<Arena> local_;  // of this process: nothing is mapped here
  mutable std::mutex mutex_;
  struct Mapped {
    size_t bytes = 0;
    std::atomic<std::byte*> base{nullptr};  // written last
  };
  mutable std::array<Mapped, kMostSegments> later_;  // by segment
};

}  // namespace dpcore
