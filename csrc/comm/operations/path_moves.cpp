// The body that runs a schedule's list of moves literally, over the transport. Scratch memory is
// kept by the operation for the next time.
#include <algorithm>
#include <cstring>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/collective/chunk_memory.h"
#include "comm/operations/collective_operation.h"

namespace dpcore {
CollectiveOperation::Until CollectiveOperation::until_entry_has_travelled() {
  const int64_t latency = shared_->transport().entry_latency_ns();
  entry_seen_ns_ = latency == 0 ? 0 : now_ns() + latency;
  awaited_ = {};
  awaited_.name = "the link";
  awaited_.custom = [](CollectiveOperation& self) {
    return self.entry_seen_ns_ == 0 || now_ns() >= self.entry_seen_ns_;
  };
  return {*this};
}

int64_t CollectiveOperation::next_event_ns() const {
  return std::min(entry_seen_ns_ > now_ns() ? entry_seen_ns_ : INT64_MAX,
                  shared_->transport().next_event_ns());
}

bool CollectiveOperation::is_held_back(int r) {
  return entry_seen_ns_ > now_ns() || shared_->transport().is_held_back(r);
}

CollectiveOperation::Steps CollectiveOperation::run_barrier_over_link() {
  co_await until_entry_has_travelled();
  count_traffic(0, 0);
  finish();
}

CollectiveOperation::Steps CollectiveOperation::run_moves() {
  co_await until_entry_has_travelled();
  if (announces_parts_) {
    check_announced_parts();
  }
  const Program& program = *request_.program;
  const Schedule& schedule = program.schedule;
  const bool swaps_in_place =
      request_.collective == Collective::all_to_all && request_.input == request_.output;

  // Where all contributions are added at once the factors go with the addition, and are not
  // rounded before. Otherwise every rank scales its contribution at the start.
  const bool has_factors = request_.op == ReduceOp::premul_sum && reduces();
  const bool prescales = has_factors && !schedule.ordered;
  const size_t scratch = lay_out_chunks(request_, program, prescales, nullptr, chunk_memory_);
  if (scratch_.size() < scratch) {
    scratch_.resize(scratch);
  }
  lay_out_chunks(request_, program, prescales, scratch_.data(), chunk_memory_);
  if (swaps_in_place) {  // what leaves must be safe before anything arrives in its place
    for (int to = 0; to < world(); ++to) {
      ChunkMemory& chunk_memory = chunk_memory_[me() * world() + to];
      if (to != me() && chunk_memory.elements > 0) {
        std::memcpy(chunk_memory.home, chunk_memory.initial, chunk_memory.elements * element_);
        chunk_memory.initial = chunk_memory.home;
      }
    }
  }
  ProgramRun::Task task;
  task.program = &program;
  task.transport = &shared_->transport();
  task.operation = number_ + 1;
  task.priority = priority;
  task.reduction = reduce_spec(false);
  if (prescales) {
    task.reduction.pre = nullptr;
  }
  task.prescale = prescales ? request_.prescale : 1.0;
  run_.start(task, chunk_memory_);
  while (!run_.done()) {
    if (!run_.step()) {
      awaited_ = {};
      awaited_.name = "a message";
      awaited_.next = std::max(0, run_.waiting_for());
      awaited_.custom = [](CollectiveOperation& self) { return self.run_.step(); };
      co_await Until{*this};
    } else {
      co_await pause();
    }
  }
  count_traffic(run_.bytes_received(), run_.bytes_sent());
  finish();
}

}  // namespace dpcore
