// Which byte ranges of an arena are in use: a best-fit allocator over offsets.
//
// It never touches the memory it hands out, so it can be tested alone and lives in private
// memory: only the owner of an arena allocates in it. Not thread-safe; the arena locks.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace dpcore {

class ArenaBlocks {
 public:
  // The offset of a free range of at least `bytes` at a multiple of `alignment` (a power of
  // two), or nothing when the arena must grow first.
  std::optional<size_t> allocate(size_t bytes, size_t alignment);
  void free(size_t offset);
  // The size that the arena has to grow to for such a range at its end.
  size_t size_for(size_t bytes, size_t alignment) const;
  // Adds [size(), new_size) to the free space.
  void grow(size_t new_size);

  size_t size() const { return size_; }
  size_t used_bytes() const { return used_bytes_; }

 private:
  void insert_free(size_t offset, size_t bytes);

  size_t size_ = 0;
  size_t used_bytes_ = 0;
  std::map<size_t, size_t> free_;  // offset -> bytes, neighbours always merged
  std::map<size_t, size_t> used_;  // offset -> bytes
};

}  // namespace dpcore
