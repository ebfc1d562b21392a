// Who sends what to whom: the geometry of each collective as pieces, in elements.
//
// A piece goes from one rank's input to another rank's output. Reducing collectives add the pieces
// that go to the same elements. Pure functions of the request, the rank that asks (`me`) and the
// size of the group (`world`).
#pragma once

#include <cstddef>

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
// Whether a rank sends the same piece to all that need it.
bool same_piece_for_all(Collective collective);
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
  const bool per_rank = request.collective != Collective::all_reduce &&
                        request.collective != Collective::broadcast &&
                        request.collective != Collective::reduce;
  return request.count * size_of(request.dtype) * (per_rank ? static_cast<size_t>(world) : 1);
}
// Of these a rank shows its own part; of all others as much as the operation has bytes, or nothing.
inline bool is_gathered(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::gather;
}
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
// And between two ranks that share no memory, whose messages would carry as much, one wait later.
inline constexpr size_t kSmallBytesOfRemotePair = 32768;
inline size_t small_bytes(int world, bool has_remote) {
  return world == 2 && has_remote ? kSmallBytesOfRemotePair : kSmallBytes;
}
// Whether the operation is so small that its data travels in the frame that announces entry.
inline bool is_small(const Request& request, int world, bool has_remote) {
  return bytes_of(request, world) <= small_bytes(world, has_remote) && !announces_parts(request) &&
         (request.force == Path::automatic || request.force == Path::stage);
}

}  // namespace dpcore
