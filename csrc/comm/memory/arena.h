// Memory of one rank that the other ranks of its host map.
//
// An arena is one memfd: no name in /dev/shm, so nothing can be left behind. The owner maps a
// large range of addresses once and grows the file underneath (ftruncate + fallocate); peers
// map the same range of the same file once, at the start, and see every later growth without
// another message (a mapping may reach beyond the end of its file). The file is sealed against
// shrinking, so no peer can be made to fault by another.
//
// Who owns what: the owner rank allocates and frees blocks, under a lock of its process that no
// transfer ever takes. Peers only read and write bytes of blocks that an operation names.
// Lifetime: blocks hold a reference to their arena, so a tensor may outlive the communicator
// and the endpoint; the memory goes when the last of them goes.
// After fork a child keeps its tensors' values but shares nothing (see fork_guard.h).
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "comm/base/descriptor.h"
#include "comm/base/error.h"
#include "comm/base/fork_guard.h"
#include "comm/memory/arena_blocks.h"

namespace dpcore {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // `reserve` bytes of addresses, of which nothing is memory yet. DPCORE_ARENA_MAX (GiB)
  // overrides the default of a quarter of a TiB.
  static std::shared_ptr<Arena> create(int rank_for_messages, size_t reserve = default_reserve());
  static size_t default_reserve();
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zero-filled the first time a range is handed out. Throws Error with the sizes when the
  // machine has no more memory to give.
  std::shared_ptr<std::byte> allocate(size_t bytes, size_t alignment = 64);

  std::byte* base() const { return base_; }
  size_t reserve() const { return reserve_; }
  int fd() const { return fd_.get(); }
  size_t size() const;
  size_t used_bytes() const;

  static constexpr size_t kNowhere = ~size_t{0};
  // The offset of [p, p + bytes) in this arena, or kNowhere.
  size_t offset_of(const void* p, size_t bytes) const {
    const auto at = static_cast<size_t>(static_cast<const std::byte*>(p) - base_);
    return at < reserve_ && bytes <= reserve_ - at ? at : kNowhere;
  }

  // After a failed operation a peer that was stopped may still write where it was told to:
  // blocks freed from now on are never handed out again.
  void stop_reuse();

 private:
  Arena() = default;
  void grow_for(size_t bytes, size_t alignment);
  Error no_addresses(size_t bytes) const;
  void release(size_t offset);

  int rank_ = 0;
  Descriptor fd_;
  std::byte* base_ = nullptr;
  size_t reserve_ = 0;
  fork_guard::Origin origin_;
  mutable std::mutex mutex_;
  ArenaBlocks blocks_;
  bool reuse_ = true;
};

// A peer's arena as seen from here.
class ArenaView {
 public:
  // Maps the arena behind a descriptor received from a peer.
  static std::shared_ptr<ArenaView> map(Descriptor fd, size_t reserve);
  // The same for a rank that is a thread of this process.
  static std::shared_ptr<ArenaView> of(std::shared_ptr<Arena> arena);
  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;

  std::byte* base() const { return base_; }

 private:
  ArenaView() = default;
  std::byte* base_ = nullptr;
  size_t mapped_ = 0;  // 0: borrowed from local_
  std::shared_ptr<Arena> local_;
};

}  // namespace dpcore
