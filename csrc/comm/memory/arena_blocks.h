// Which byte ranges of an arena are in use: a best-fit allocator over offsets.
//
// It never touches the memory it hands out, so it can be tested alone and lives in private
// memory: only the owner of an arena allocates in it. Not thread-safe; the arena locks.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <string>

#include "comm/base/error.h"

namespace dpcore {

class ArenaBlocks {
 public:
  // The offset of a free range of at least `bytes` at a multiple of `alignment` (a power of
  // two), or nothing when the arena must grow first.
  // Best fit keeps large holes whole, which matters for gradients: a few sizes, freed and taken
  // again in the same order at each step.
  std::optional<size_t> allocate(size_t bytes, size_t alignment) {
    auto best = free_.end();
    size_t best_start = 0;
    for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
      const size_t start = (hole->first + alignment - 1) & ~(alignment - 1);
      const bool fits = start + bytes <= hole->first + hole->second;
      if (fits && (best == free_.end() || hole->second < best->second)) {
        best = hole;
        best_start = start;
      }
    }
    if (best == free_.end()) {
      return std::nullopt;
    }
    const size_t hole_begin = best->first;
    const size_t hole_end = hole_begin + best->second;
    free_.erase(best);
    if (best_start > hole_begin) {
      free_.emplace(hole_begin, best_start - hole_begin);
    }
    if (best_start + bytes < hole_end) {
      free_.emplace(best_start + bytes, hole_end - best_start - bytes);
    }
    used_.emplace(best_start, bytes);
    used_bytes_ += bytes;
    return best_start;
  }
  void free(size_t offset) {
    const auto block = used_.find(offset);
    if (block == used_.end()) {
      throw Error("arena: freeing offset " + std::to_string(offset) + ", which is not in use");
    }
    const size_t bytes = block->second;
    used_.erase(block);
    used_bytes_ -= bytes;
    insert_free(offset, bytes);
  }
  // The size that the arena has to grow to for such a range at its end.
  size_t size_for(size_t bytes, size_t alignment) const {
    size_t end = size_;
    if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == size_) {
      end = free_.rbegin()->first;
    }
    return ((end + alignment - 1) & ~(alignment - 1)) + bytes;
  }
  // Adds [size(), new_size) to the free space.
  void grow(size_t new_size) {
    if (new_size > size_) {
      insert_free(size_, new_size - size_);
      size_ = new_size;
    }
  }

  // The free ranges: offset -> bytes.
  const std::map<size_t, size_t>& holes() const { return free_; }
  size_t size() const { return size_; }
  size_t used_bytes() const { return used_bytes_; }

 private:
  void insert_free(size_t offset, size_t bytes) {
    const auto next = free_.lower_bound(offset);
    if (next != free_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        offset = previous->first;
        bytes += previous->second;
        free_.erase(previous);
      }
    }
    if (next != free_.end() && offset + bytes == next->first) {
      bytes += next->second;
      free_.erase(next);
    }
    free_.emplace(offset, bytes);
  }

  size_t size_ = 0;
  size_t used_bytes_ = 0;
  std::map<size_t, size_t> free_;  // offset -> bytes, neighbours always merged
  std::map<size_t, size_t> used_;  // offset -> bytes
};

}  // namespace dpcore
