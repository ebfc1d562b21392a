// One table per question, by collective; geometry.h has the words.
#include "comm/collective/geometry.h"

#include <algorithm>
#include <utility>

namespace dpcore {

Piece outgoing(const Request& request, int me, int to) {
  const auto& parts = request.input_parts;
  switch (request.collective) {
    case Collective::all_reduce:
      return {request.count, 0, 0};
    case Collective::broadcast:
      return me == request.root ? Piece{request.count, 0, 0} : Piece{};
    case Collective::reduce:
      return to == request.root ? Piece{request.count, 0, 0} : Piece{};
    case Collective::all_gather:
      return {part_of(request, parts, me), 0, part_begin_of(request, parts, me)};
    case Collective::gather:
      return to == request.root
                 ? Piece{part_of(request, parts, me), 0, part_begin_of(request, parts, me)}
                 : Piece{};
    case Collective::scatter:
      return me == request.root
                 ? Piece{part_of(request, parts, to), part_begin_of(request, parts, to), 0}
                 : Piece{};
    case Collective::reduce_scatter:
      return {part_of(request, parts, to), part_begin_of(request, parts, to), 0};
    case Collective::all_to_all:
      // Where it lands at an uneven peer only the peer knows: such pieces go by the stage.
      return {part_of(request, parts, to), part_begin_of(request, parts, to),
              part_begin_of(request, request.output_parts, me)};
    case Collective::barrier:
      break;
  }
  return {};
}

// What the giver says, from the other side. In an exchange only its taker knows here how much it
// is.
Piece incoming(const Request& request, int me, int from) {
  Piece piece = outgoing(request, from, me);
  std::swap(piece.mine, piece.theirs);
  if (request.collective == Collective::all_to_all) {
    piece.elements = part_of(request, request.output_parts, from);
  }
  return piece;
}

bool publishes(const Request& request, int r) {
  return r == request.root ? !goes_to_root(request.collective)
                           : !comes_from_root(request.collective);
}

bool consumes(const Request& request, int r) {
  return r == request.root ? !comes_from_root(request.collective)
                           : !goes_to_root(request.collective);
}

MemoryUse memory_use(const Request& request, int me, int world) {
  size_t read = 0;
  size_t written = 0;
  const bool gets = consumes(request, me) || keeps_a_piece(request, me);
  for (int r = 0; r < world; ++r) {
    const Piece out = outgoing(request, me, r);
    const Piece in = incoming(request, me, r);
    read = std::max(read, out.mine + out.elements);
    written = gets ? std::max(written, in.mine + in.elements) : 0;
  }
  const size_t element = size_of(request.dtype);
  return {request.input, read * element, request.output, written * element};
}

bool MemoryUse::conflicts_with(const MemoryUse& other) const {
  const auto overlap = [](const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
  };
  return overlap(written, written_bytes, other.written, other.written_bytes) ||
         overlap(written, written_bytes, other.read, other.read_bytes) ||
         overlap(read, read_bytes, other.written, other.written_bytes);
}

size_t staged_elements(const Request& request, int me, int world) {
  size_t largest = 0;
  size_t sum = 0;
  for (int r = 0; r < world; ++r) {
    const size_t elements = publishes(request, me) && consumes(request, r) && r != me
                                ? outgoing(request, me, r).elements
                                : 0;
    largest = std::max(largest, elements);
    sum += elements;
  }
  return splits(request.collective) ? sum : largest;
}

size_t received_elements(const Request& request, int me, int world) {
  size_t sum = 0;
  for (int r = 0; r < world; ++r) {
    sum += consumes(request, me) && publishes(request, r) && r != me
               ? incoming(request, me, r).elements
               : 0;
  }
  return sum;
}

bool keeps_a_piece(const Request& request, int me) {
  switch (request.collective) {
    case Collective::all_gather:
    case Collective::all_to_all:
      return true;
    case Collective::gather:
    case Collective::scatter:
      return me == request.root;
    default:
      return false;
  }
}

namespace {

constexpr size_t kAlignment = 64;

struct Location {
  const std::byte* input = nullptr;  // where this rank's own contribution or piece lies
  std::byte* output = nullptr;       // where the chunk belongs at the end
  size_t elements = 0;
};

Location locate(const Request& request, const Schedule& schedule, int me, int chunk) {
  const int root = request.root;
  const int world = schedule.world;
  const size_t element = size_of(request.dtype);
  const auto at = [element](auto* base, size_t elements) { return base + elements * element; };
  switch (request.collective) {
    case Collective::all_reduce:
    case Collective::broadcast:
    case Collective::reduce: {
      const ElementRange range = chunk_range(request.count, schedule.chunks, chunk);
      const bool holds = request.collective != Collective::broadcast || me == root;
      const bool ends = request.collective != Collective::reduce || me == root;
      return {holds ? at(request.input, range.begin) : nullptr,
              ends ? at(request.output, range.begin) : nullptr, range.size()};
    }
    case Collective::reduce_scatter:
      return {at(request.input, part_begin_of(request, request.input_parts, chunk)),
              chunk == me ? request.output : nullptr, part_of(request, request.input_parts, chunk)};
    case Collective::all_gather:
    case Collective::gather: {
      const bool ends = request.collective == Collective::all_gather || me == root;
      const uint64_t begin = part_begin_of(request, request.output_parts, chunk);
      return {chunk == me ? request.input : nullptr, ends ? at(request.output, begin) : nullptr,
              part_of(request, request.output_parts, chunk)};
    }
    case Collective::scatter: {
      const uint64_t begin = part_begin_of(request, request.input_parts, chunk);
      return {me == root ? at(request.input, begin) : nullptr,
              chunk == me ? request.output : nullptr, part_of(request, request.input_parts, chunk)};
    }
    case Collective::all_to_all: {
      const int from = chunk / world;
      const int to = chunk % world;
      const size_t elements = from == me ? part_of(request, request.input_parts, to)
                              : to == me ? part_of(request, request.output_parts, from)
                                         : request.count;
      return {
          from == me ? at(request.input, part_begin_of(request, request.input_parts, to)) : nullptr,
          to == me ? at(request.output, part_begin_of(request, request.output_parts, from))
                   : nullptr,
          elements};
    }
    case Collective::barrier:
      break;
  }
  return {};
}

}  // namespace

uint64_t part_of(const Request& request, const std::vector<uint64_t>& parts, int r) {
  return parts.empty() ? request.count : parts[r];
}

uint64_t part_begin_of(const Request& request, const std::vector<uint64_t>& parts, int r) {
  if (parts.empty()) {
    return request.count * static_cast<uint64_t>(r);
  }
  uint64_t begin = 0;
  for (int i = 0; i < r; ++i) {
    begin += parts[i];
  }
  return begin;
}

size_t lay_out_chunks(const Request& request, const Program& program, bool prescales,
                      std::byte* scratch, std::vector<ChunkMemory>& chunks) {
  const Schedule& schedule = program.schedule;
  chunks.assign(schedule.chunks, {});
  size_t used = 0;
  for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
    const Location location = locate(request, schedule, program.rank, chunk);
    const bool moves = !program.lanes[chunk].empty();
    if (!moves && (location.input == nullptr || location.output == nullptr)) {
      continue;
    }
    const bool sent_only = location.output == nullptr && !program.receives(chunk) && !prescales;
    ChunkMemory& chunk_memory = chunks[chunk];
    chunk_memory = {location.input, location.output, location.elements};
    if (sent_only && !swaps_in_place(request)) {
      chunk_memory.home = const_cast<std::byte*>(location.input);
    } else if (location.output == nullptr) {
      chunk_memory.home = scratch == nullptr ? nullptr : scratch + used;
      const size_t bytes = location.elements * size_of(request.dtype);
      used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  return used;
}

}  // namespace dpcore
