// See stream_moves.h.
#include "cuda/stream/stream_moves.h"

#include <algorithm>

namespace dpcore {
namespace {

size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

struct Execution {
  const Request& request;
  const Program& program;
  Device& device;
  Device::Stream stream;
  StreamMessages& messages;
  std::vector<ChunkMemory> chunks;
  std::byte* arrivals = nullptr;  // of one step
  const size_t element = size_of(request.dtype);
  const ReduceSpec reduction = reduction_over(program.schedule.world, request.op, request.dtype);

  // This rank's part of a step, in the order of chunks, which is the same on every rank.
  template <class Use>
  void for_each_lane(int step, Use use) const {
    for (int chunk = 0; chunk < program.schedule.chunks; ++chunk) {
      for (const LaneStep& lane : program.lanes[chunk]) {
        if (lane.step == step && chunks[chunk].elements > 0) {
          use(lane, chunks[chunk]);
        }
      }
    }
  }

  // What is copied goes straight home, unless the chunk leaves from there in the same step.
  static bool arrives_at_home(const LaneStep& lane) { return !lane.reduces && lane.sends.empty(); }

  size_t arrival_bytes(int step) const {
    size_t bytes = 0;
    for_each_lane(step, [&](const LaneStep& lane, const ChunkMemory& chunk_memory) {
      if (!arrives_at_home(lane)) {
        bytes += lane.receives.size() * padded(chunk_memory.elements * element);
      }
    });
    return bytes;
  }

  void bring_home(bool prescales) {
    for (const ChunkMemory& chunk_memory : chunks) {
      if (chunk_memory.initial == nullptr || chunk_memory.elements == 0) {
        continue;
      }
      if (prescales) {
        const void* in = chunk_memory.initial;
        void* out = chunk_memory.home;
        device.reduce(stream, {.dtype = request.dtype, .pre = &request.prescale}, {&in, 1},
                      {&out, 1}, chunk_memory.elements);
      } else if (chunk_memory.initial != chunk_memory.home) {
        device.copy(stream, chunk_memory.home, chunk_memory.initial,
                    chunk_memory.elements * element);
      }
    }
  }

  void run_step(int step) {
    std::byte* arrival = arrivals;
    messages.begin_group();
    for_each_lane(step, [&](const LaneStep& lane, const ChunkMemory& chunk_memory) {
      const size_t bytes = chunk_memory.elements * element;
      for (const int to : lane.sends) {
        messages.send(chunk_memory.home, bytes, to);
      }
      for (const int from : lane.receives) {
        messages.receive(arrives_at_home(lane) ? chunk_memory.home : arrival, bytes, from);
        arrival += arrives_at_home(lane) ? 0 : padded(bytes);
      }
    });
    messages.end_group();
    arrival = arrivals;
    for_each_lane(step, [&](const LaneStep& lane, const ChunkMemory& chunk_memory) {
      if (arrives_at_home(lane) || lane.receives.empty()) {
        return;
      }
      if (lane.reduces) {
        add(lane, chunk_memory, arrival);
      } else {
        device.copy(stream, chunk_memory.home, arrival, chunk_memory.elements * element);
      }
      arrival += lane.receives.size() * padded(chunk_memory.elements * element);
    });
  }

  // All contributions of the step at once, in rank order.
  void add(const LaneStep& lane, const ChunkMemory& chunk_memory, const std::byte* arrival) {
    const size_t distance = padded(chunk_memory.elements * element);
    std::vector<const void*> operands;
    operands.reserve(lane.receives.size() + 1);
    in_rank_order(
        lane, program.rank, [&] { operands.push_back(chunk_memory.home); },
        [&](size_t i) { operands.push_back(arrival + i * distance); });
    void* out = chunk_memory.home;
    const ReduceSpec partial{.dtype = reduction.dtype, .op = reduction.op};
    device.reduce(stream, lane.completes ? reduction : partial, operands, {&out, 1},
                  chunk_memory.elements);
  }
};

}  // namespace

std::string algorithm_of_fewest_bytes(Collective collective, int world) {
  if (collective == Collective::all_reduce) {
    return "two_shot";
  }
  return is_on_whole(collective) && world > 2 ? "two_shot" : "direct";
}

void run_moves(const Request& request, Device& device, Device::Stream stream,
               StreamMessages& messages, const Scratch& scratch) {
  const Program& program = *request.program;
  Execution execution{request, program, device, stream, messages, {}};
  const bool prescales = request.op == ReduceOp::premul_sum;
  const int steps = program.schedule.moves.empty() ? 0 : program.schedule.moves.back().step + 1;
  const size_t homes =
      padded(lay_out_chunks(request, program, prescales, nullptr, execution.chunks));
  size_t arrivals = 0;
  for (int step = 0; step < steps; ++step) {
    arrivals = std::max(arrivals, execution.arrival_bytes(step));
  }
  std::byte* memory = homes + arrivals == 0 ? nullptr : scratch(homes + arrivals);
  lay_out_chunks(request, program, prescales, memory, execution.chunks);
  execution.arrivals = memory + homes;
  execution.bring_home(prescales);
  for (int step = 0; step < steps; ++step) {
    execution.run_step(step);
  }
}

}  // namespace dpcore
