// The body that runs a schedule's list of moves literally, over the transport.
//
// Here every chunk gets its home on this rank: the output when the chunk belongs there at the
// end, the input when it only has to be sent, and otherwise scratch memory that the operation
// keeps for the next time.
#include <algorithm>
#include <cstring>

#include "comm/clock.h"
#include "comm/collective_operation.h"
#include "comm/error.h"

namespace dpcore {
namespace {

struct Location {
  const std::byte* input = nullptr;  // where this rank's own contribution or piece lies
  std::byte* output = nullptr;       // where the chunk belongs at the end
  size_t elements = 0;
};

}  // namespace

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
  const int root = request_.root;
  const bool swaps_in_place =
      request_.collective == Collective::all_to_all && request_.input == request_.output;

  const auto locate = [&](int chunk) -> Location {
    const auto at = [&](auto* base, size_t elements) { return base + elements * element_; };
    switch (request_.collective) {
      case Collective::all_reduce:
      case Collective::broadcast:
      case Collective::reduce: {
        const ElementRange range = chunk_range(request_.count, schedule.chunks, chunk);
        const bool holds = request_.collective != Collective::broadcast || me() == root;
        const bool ends = request_.collective != Collective::reduce || me() == root;
        return {holds ? at(request_.input, range.begin) : nullptr,
                ends ? at(request_.output, range.begin) : nullptr, range.size()};
      }
      case Collective::reduce_scatter:
        return {at(request_.input, part_begin(request_.input_parts, chunk)),
                chunk == me() ? request_.output : nullptr, part(request_.input_parts, chunk)};
      case Collective::all_gather:
      case Collective::gather: {
        const bool ends = request_.collective == Collective::all_gather || me() == root;
        return {chunk == me() ? request_.input : nullptr,
                ends ? at(request_.output, part_begin(request_.output_parts, chunk)) : nullptr,
                part(request_.output_parts, chunk)};
      }
      case Collective::scatter:
        return {
            me() == root ? at(request_.input, part_begin(request_.input_parts, chunk)) : nullptr,
            chunk == me() ? request_.output : nullptr, part(request_.input_parts, chunk)};
      case Collective::all_to_all: {
        const int from = chunk / world();
        const int to = chunk % world();
        const Piece out = outgoing(to);
        const Piece in = incoming(from);
        const size_t elements = from == me() ? out.elements
                                : to == me() ? in.elements
                                             : request_.count;
        return {from == me() ? at(request_.input, out.mine) : nullptr,
                to == me() ? at(request_.output, in.mine) : nullptr, elements};
      }
      case Collective::barrier:
        break;
    }
    return {};
  };

  // Where all contributions are added at once the factors go with the addition, and are not
  // rounded before. Otherwise every rank scales its contribution at the start.
  const bool has_factors = request_.op == ReduceOp::premul_sum && reduces();
  const bool prescales = has_factors && !schedule.ordered;
  places_.assign(schedule.chunks, {});
  size_t scratch_bytes = 0;
  for (int pass = 0; pass < 2; ++pass) {  // first how much scratch, then where
    size_t used = 0;
    for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
      const Location location = locate(chunk);
      const bool moves = !program.lanes[chunk].empty();
      if (!moves && (location.input == nullptr || location.output == nullptr)) {
        continue;
      }
      const bool sent_only = location.output == nullptr && !program.receives(chunk) && !prescales;
      ChunkPlace& place = places_[chunk];
      place = {location.input, location.output, location.elements};
      if (sent_only && !swaps_in_place) {
        place.home = const_cast<std::byte*>(location.input);
      } else if (location.output == nullptr) {
        place.home = scratch_.data() + used;
        used += (location.elements * element_ + 63) / 64 * 64;
      }
    }
    scratch_bytes = used;
    if (scratch_.size() < scratch_bytes) {
      scratch_.resize(scratch_bytes);
    }
  }
  if (swaps_in_place) {  // what leaves must be safe before anything arrives in its place
    for (int to = 0; to < world(); ++to) {
      ChunkPlace& place = places_[me() * world() + to];
      if (to != me() && place.elements > 0) {
        std::memcpy(place.home, place.initial, place.elements * element_);
        place.initial = place.home;
      }
    }
  }
  ProgramRun::Task task;
  task.program = &program;
  task.transport = &shared_->transport();
  task.operation = number_ + 1;
  task.dtype = request_.dtype;
  const ReduceSpec spec = reduce_spec(false);
  task.op = spec.op;
  task.factors = prescales ? nullptr : spec.pre;
  task.mean_scale = request_.op == ReduceOp::mean ? 1.0 / world() : 1.0;
  task.prescale = prescales ? request_.prescale : 1.0;
  run_.start(task, places_);
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
