// Which bytes go from which rank to which, and where they lie on the way: the geometry of each
// collective.
//
//   pieces  from one rank's input to another rank's output, in elements. Reducing collectives add
//           the pieces that go to the same elements.
//   chunks  of a schedule: where each of them lies on one rank, for what executes the list of
//   moves,
//           over a transport (comm/operations/path_moves.cpp) or in the order of a stream
//           (cuda/stream/stream_moves.h)
//   stage   the places of a buffer of ordinary memory in the stage, through which peers see it
//
// Pure functions of the request, the rank that asks (`me`) and the size of the group (`world`).
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "comm/collective/request.h"

namespace dpcore {

struct Piece {
  size_t elements = 0;
  size_t mine = 0;    // offset in my buffer (input when outgoing, output when incoming)
  size_t theirs = 0;  // offset in the peer's buffer
};

Piece outgoing(const Request& request, int me, int to);
Piece incoming(const Request& request, int me, int from);
// Whether others need data of rank r, and whether r needs data of others.
bool publishes(const Request& request, int r);
bool consumes(const Request& request, int r);
// What this rank copies into its stage, and what it reads from the stages of the others.
size_t staged_elements(const Request& request, int me, int world);
size_t received_elements(const Request& request, int me, int world);
// Whether one piece goes from this rank's input to its own output.
bool keeps_a_piece(const Request& request, int me);

// What of this rank's memory an operation reads and writes while it is in flight.
struct MemoryUse {
  const std::byte* read = nullptr;
  size_t read_bytes = 0;
  const std::byte* written = nullptr;
  size_t written_bytes = 0;

  // Whether one of the two writes what the other one uses.
  bool conflicts_with(const MemoryUse& other) const;
};
MemoryUse memory_use(const Request& request, int me, int world);

// Inline, as a small operation asks them all.

// Bytes in the whole buffer, or in all ranks' parts together.
inline size_t bytes_of(const Request& request, int world) {
  const size_t parts = is_on_whole(request.collective) ? 1 : static_cast<size_t>(world);
  return request.count * size_of(request.dtype) * parts;
}
// Of these a rank shows its own part; of all others as much as the operation has bytes, or nothing.
inline bool is_gathered(Collective collective) { return joins(collective) && !splits(collective); }
// An uneven all_to_all, in which ranks know only their own sizes.
inline bool announces_parts(const Request& request) {
  return request.collective == Collective::all_to_all && !request.input_parts.empty();
}
// What arrives would overwrite what has not left yet, unless it goes by the stage.
inline bool swaps_in_place(const Request& request) {
  return request.collective == Collective::all_to_all && request.input == request.output;
}
// Up to here an all-reduce goes through the stage at once even when it lies in an arena: one wait
// instead of two.
inline constexpr size_t kSmallBytes = 16384;
// And over TCP, between two ranks, whose messages would carry as much, one wait later, or on one
// machine, where bytes cost less than a wait.
inline constexpr size_t kSmallBytesOfFrames = 65536;
// Whether the operation is so small that its data travels in the frame that announces entry: no
// larger than `small_bytes`, which Group knows.
inline bool is_small(const Request& request, int world, size_t small_bytes) {
  return bytes_of(request, world) <= small_bytes && !announces_parts(request) &&
         (request.force == Path::automatic || request.force == Path::stage);
}

// ---- the chunks of a schedule

// Elements of rank r's part, and of those before it. `parts` empty: all have request.count.
uint64_t part_of(const Request& request, const std::vector<uint64_t>& parts, int r);
uint64_t part_begin_of(const Request& request, const std::vector<uint64_t>& parts, int r);

// Gives every chunk its home: the output when the chunk belongs there at the end, the input when it
// only has to be sent, and otherwise memory from `scratch` on. Returns how many bytes of scratch
// that takes; with `scratch` null the chunks only say so. `prescales`: the input is multiplied on
// its way home, and may not be its own.
size_t lay_out_chunks(const Request& request, const Program& program, bool prescales,
                      std::byte* scratch, std::vector<ChunkMemory>& chunks);

// ---- the stage
//
// Ordinary memory goes through it in chunks, each of which has a buffer of the stage, where each of
// its pieces has its place. A *quota* is how many elements of one piece go into one chunk.
//
//   stage   [ announced sizes ] [ buffer 0 ][ buffer 1 ][ buffer 2 ][ buffer 3 ]
//   buffer  [ the piece for all ranks ], or [ piece for rank 0 ][ piece for rank 1 ]...

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
  size_t pieces = 1;             // of a chunk: one for all ranks, or one for each rank
  bool announces_parts = false;  // uneven all_to_all: the stage begins with what its owner sends

  // Of what is not small. Few bytes are cut finer, so that readers begin early, but not much: a
  // chunk has two waits. 0 where not even a line of each piece has room.
  size_t quota() const {
    constexpr size_t kLine = 64;
    constexpr size_t kFinestChunk = 32768;
    constexpr size_t kChunksAtLeast = 4;  // filling and reading overlap
    const size_t largest = (kStageBytes - front()) / kStageBuffers;
    const size_t wanted = std::max({kFinestChunk, bytes / kChunksAtLeast, pieces * kLine});
    return (announces_parts ? largest : std::min(largest, wanted)) / pieces / kLine * kLine /
           element;
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
  constexpr size_t kChunksAtLeast = 2;  // all ranks fill at once: there is nothing to begin early
  constexpr size_t kLargest = kStageBytes / kStageBuffers;
  return std::clamp(bytes / kChunksAtLeast, kFinestChunk, kLargest) / 64 * 64 / element;
}

inline size_t two_shot_offset(size_t chunk) {
  return chunk % kStageBuffers * (kStageBytes / kStageBuffers);
}

}  // namespace dpcore
