// How ordinary memory is cut to go through the stage: into chunks, each of which has a buffer of
// the stage, where each of its pieces has its place.
//
//   stage   [ announced sizes ] [ buffer 0 ][ buffer 1 ][ buffer 2 ][ buffer 3 ]
//   buffer  [ the piece for everybody ], or [ piece for rank 0 ][ piece for rank 1 ]...
//
// Pure functions of what all ranks know, so that all cut alike. A *quota* is how many elements of
// one piece go into one chunk.
#pragma once

#include <algorithm>
#include <cstddef>

#include "comm/memory/control.h"

namespace dpcore {

inline constexpr size_t kStageBuffers = 4;
inline constexpr size_t kAnnouncedBytes = 4096;  // at the front, where parts differ

inline size_t chunks_of(size_t elements, size_t quota) { return (elements + quota - 1) / quota; }

// Elements of the chunk with this number.
inline size_t in_chunk(size_t elements, size_t chunk, size_t quota) {
  const size_t begin = chunk * quota;
  return begin >= elements ? 0 : std::min(quota, elements - begin);
}

struct StageLayout {
  size_t element = 1;            // bytes of one
  size_t bytes = 0;              // of the whole operation
  size_t pieces = 1;             // of a chunk: one for everybody, or one for each rank
  bool announces_parts = false;  // uneven all_to_all: the stage begins with what its owner sends

  // Of what is not small. Few bytes are cut finer, so that readers begin early.
  size_t quota() const {
    constexpr size_t kFinestChunk = 32768;
    constexpr size_t kChunksAtLeast = 32;  // filling and reading overlap
    const size_t largest = (kStageBytes - front()) / kStageBuffers;
    const size_t wanted = std::max(kFinestChunk, bytes / kChunksAtLeast);
    return (announces_parts ? largest : std::min(largest, wanted)) / pieces / 64 * 64 / element;
  }
  // Where a piece of a chunk begins, in bytes.
  size_t offset(size_t chunk, size_t piece, size_t quota) const {
    const size_t piece_bytes = (quota * element + 63) / 64 * 64;
    return front() + (chunk % kStageBuffers * pieces + piece) * piece_bytes;
  }
  size_t front() const { return announces_parts ? kAnnouncedBytes : 0; }
};

// Of two_shot/stage, whose chunks are whole buffers, cut into slices as all of the data would be.
inline size_t two_shot_quota(size_t bytes, size_t element) {
  constexpr size_t kFinestChunk = 32768;
  constexpr size_t kChunksAtLeast = 8;  // each has two waits
  constexpr size_t kLargest = kStageBytes / kStageBuffers;
  return std::clamp(bytes / kChunksAtLeast, kFinestChunk, kLargest) / 64 * 64 / element;
}

inline size_t two_shot_offset(size_t chunk) {
  return chunk % kStageBuffers * (kStageBytes / kStageBuffers);
}

}  // namespace dpcore
