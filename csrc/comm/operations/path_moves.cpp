// The body that runs a schedule's list of moves literally, over the transport. Scratch memory is
// kept by the operation for the next time.
#include <algorithm>
#include <cstring>

#include "comm/base/clock.h"
#include "comm/collective/geometry.h"
#include "comm/operations/path_run.h"

namespace dpcore {
namespace {

// On an emulated link the word that the last rank has entered takes its time as well.
PathRun::Until until_entry_has_travelled(PathRun& run) {
  run.entry_seen_ns = run.shared->has_link() ? now_ns() + run.shared->entry_latency_ns() : 0;
  return run.until("the link", [](PathRun& self) {
    return self.entry_seen_ns == 0 || now_ns() >= self.entry_seen_ns;
  });
}

}  // namespace

Steps run_barrier_over_link(PathRun& run) {
  co_await until_entry_has_travelled(run);
  run.count_traffic(0, 0);
  run.finish();
}

Steps run_moves(PathRun& run) {
  co_await until_entry_has_travelled(run);
  if (run.announces_parts) {
    check_announced_parts(run);
  }
  const Program& program = *run.request.program;
  const Schedule& schedule = program.schedule;
  // Where all contributions are added at once the factors go with the addition, and are not
  // rounded before. Otherwise every rank scales its contribution at the start.
  const bool has_factors = run.request.op == ReduceOp::premul_sum && run.reduces();
  const bool prescales = has_factors && !schedule.ordered;
  std::vector<ChunkMemory>& memory = run.moves.memory;
  std::vector<std::byte>& scratch = run.moves.scratch;
  ProgramRun& moves = run.moves.run;
  const size_t bytes = lay_out_chunks(run.request, program, prescales, nullptr, memory);
  if (scratch.size() < bytes) {
    scratch.resize(bytes);
  }
  lay_out_chunks(run.request, program, prescales, scratch.data(), memory);
  if (swaps_in_place(
          run.request)) {  // what leaves must be safe before anything arrives in its place
    for (int to = 0; to < run.world(); ++to) {
      ChunkMemory& chunk = memory[run.me() * run.world() + to];
      if (to != run.me() && chunk.elements > 0) {
        std::memcpy(chunk.home, chunk.initial, chunk.elements * run.element);
        chunk.initial = chunk.home;
      }
    }
  }
  ProgramRun::Task task;
  task.program = &program;
  task.transport = &run.shared->transport();
  task.others = &run.shared->runs();
  task.operation = run.number + 1;
  task.priority = run.operation.priority;
  task.input = run.request.input;
  task.reduction = run.reduce_spec();
  if (prescales) {
    task.reduction.pre = nullptr;
  }
  task.prescale = prescales ? run.request.prescale : 1.0;
  moves.start(task, memory);
  const RunsInFlight::Entry entry(run.shared->runs(), moves);
  RemoteMembers* const remote = run.group->remote();
  const Network::Moving moving(remote == nullptr ? nullptr : &remote->network(),
                               run.operation.priority);
  while (!moves.done()) {
    if (!moves.step()) {
      co_await run.until(
          "a message", [](PathRun& self) { return self.moves.run.step(); },
          std::max(0, moves.waiting_for()));
    } else {
      co_await run.pause();
    }
  }
  run.count_traffic(moves.bytes_received(), moves.bytes_sent());
  run.finish();
}

}  // namespace dpcore
