// Where the chunks of a schedule lie on one rank, for whoever executes its list of moves: over a
// transport (comm/operations/path_moves.cpp) or in the order of a stream
// (cuda/stream/stream_moves.h).
#pragma once

#include <vector>

#include "comm/collective/request.h"

namespace dpcore {

// Elements of rank r's part, and of those before it. `parts` empty: all have request.count.
uint64_t part_of(const Request& request, const std::vector<uint64_t>& parts, int r);
uint64_t part_begin_of(const Request& request, const std::vector<uint64_t>& parts, int r);

// Gives every chunk its home: the output when the chunk belongs there at the end, the input when it
// only has to be sent, and otherwise memory from `scratch` on. Returns how many bytes of scratch
// that takes; with `scratch` null the chunks only say so. `prescales`: the input is multiplied on
// its way home, and may not be its own.
size_t lay_out_chunks(const Request& request, const Program& program, bool prescales,
                      std::byte* scratch, std::vector<ChunkMemory>& chunks);

}  // namespace dpcore
