// See chunk_memory.h.
#include "comm/collective/chunk_memory.h"

#include "comm/collective/pieces.h"

namespace dpcore {
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
