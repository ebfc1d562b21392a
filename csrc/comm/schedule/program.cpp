// From the list of moves to the lanes of one rank.
#include "comm/schedule/program.h"

#include <algorithm>
#include <climits>

#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "comm/schedule/check.h"

namespace dpcore {
namespace {

// How far the first messages of a step may be ahead of the last ones. Ranks are out of step by some
// messages, and a NIC that waits for its turn needs something else to send meanwhile.
constexpr size_t kSegmentsAhead = 2;

uint64_t hash_of(const Schedule& schedule) {
  Fnv hash;
  hash.add(static_cast<uint64_t>(schedule.collective));
  hash.add(static_cast<uint64_t>(schedule.world));
  hash.add(static_cast<uint64_t>(schedule.chunks));
  hash.add(static_cast<uint64_t>(schedule.root));
  for (const Move& move : schedule.moves) {
    hash.add(static_cast<uint64_t>(move.step));
    hash.add(static_cast<uint64_t>(move.src));
    hash.add(static_cast<uint64_t>(move.dst));
    hash.add(static_cast<uint64_t>(move.chunk) * 2 + (move.reduce ? 1 : 0));
  }
  return hash.value();
}

LaneStep& lane_step(std::vector<LaneStep>& lane, int step) {
  if (lane.empty() || lane.back().step != step) {
    lane.emplace_back();
    lane.back().step = step;
  }
  return lane.back();
}

LaneStep& step_of(std::vector<LaneStep>& lane, int step) {
  return *std::find_if(lane.begin(), lane.end(), [&](LaneStep& one) { return one.step == step; });
}

// One step of all ranks: `places` says which of its sender's moves in the step each one is.
struct StepMoves {
  const Move* begin;
  const Move* end;
  std::vector<size_t> places;
};

StepMoves step_from(const Schedule& schedule, const Move* begin) {
  StepMoves step{begin, begin, {}};
  std::vector<size_t> sent(static_cast<size_t>(schedule.world));
  const Move* const last = schedule.moves.data() + schedule.moves.size();
  for (; step.end != last && step.end->step == begin->step; ++step.end) {
    step.places.push_back(sent[static_cast<size_t>(step.end->src)]++);
  }
  return step;
}

// What comes to this rank as the message at this place of its sender's. None, if that is no message
// or several, or this rank takes it only after it has sent something itself.
Turn arrival_at(Program& program, const StepMoves& step, size_t place) {
  Turn found;
  for (const Move* move = step.begin; move != step.end; ++move) {
    if (move->dst == program.rank && step.places[move - step.begin] == place) {
      const bool is_only = found.source < 0;
      const LaneStep& own = step_of(program.lanes[move->chunk], move->step);
      if (!is_only || !own.sends.empty()) {
        return {};
      }
      found = {move->src, move->chunk};
    }
  }
  return found;
}

void take_turns(Program& program, const StepMoves& step) {
  size_t last = 0;
  for (const Move* move = step.begin; move != step.end; ++move) {
    if (move->dst == program.rank) {
      last = std::max(last, step.places[move - step.begin]);
    }
  }
  for (const Move* move = step.begin; move != step.end; ++move) {
    if (move->src == program.rank) {
      const size_t place = step.places[move - step.begin];
      Turn turn;
      if (last > 0) {
        turn = arrival_at(program, step, place > 0 ? place - 1 : last);
        turn.segments_ago = place > 0 ? 0 : kSegmentsAhead;
        program.has_turns |= turn.source >= 0;
      }
      step_of(program.lanes[move->chunk], move->step).turns.push_back(turn);
    }
  }
}

// What each rank adds to or sends is its own contribution until it has received something there.
void name_operands(Program& program) {
  const Schedule& schedule = program.schedule;
  const auto chunks = static_cast<size_t>(schedule.chunks);
  std::vector<int> received(static_cast<size_t>(schedule.world) * chunks, INT_MAX);  // first
  for (const Move& move : schedule.moves) {
    int& first = received[static_cast<size_t>(move.dst) * chunks + move.chunk];
    first = std::min(first, move.step);
  }
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    for (LaneStep& step : program.lanes[chunk]) {
      const auto add = [&](int rank) {
        const bool is_own = received[static_cast<size_t>(rank) * chunks + chunk] >= step.step;
        step.operands.push_back(is_own ? rank : FiniteCheck::kSum);
      };
      if (step.reduces) {
        in_rank_order(
            step, program.rank, [&] { add(program.rank); },
            [&](size_t i) { add(step.receives[i]); });
      }
    }
  }
}

}  // namespace

void check_fits(const Schedule& schedule, Collective collective, int root, int world) {
  if (schedule.collective != collective) {
    throw Unsupported("this schedule is for " + std::string(name_of(schedule.collective)) +
                      ", not for " + std::string(name_of(collective)));
  }
  if (schedule.world != world) {
    throw Unsupported("this schedule is for " + std::to_string(schedule.world) +
                      " ranks, and the communicator has " + std::to_string(world) +
                      ". Make one for it: dpcore.schedule(name, collective, " +
                      std::to_string(world) + ")");
  }
  if (schedule.root != root) {
    throw Unsupported("this schedule is for root " + std::to_string(schedule.root) +
                      ", not for root " + std::to_string(root));
  }
}

std::vector<int> order_of_chunks(const Schedule& schedule, int rank) {
  std::vector<int> order;
  std::vector<bool> listed(static_cast<size_t>(schedule.chunks));
  const auto list = [&](int chunk) {
    if (!listed[static_cast<size_t>(chunk)]) {
      listed[static_cast<size_t>(chunk)] = true;
      order.push_back(chunk);
    }
  };
  for (int Move::* const end : {&Move::src, &Move::dst}) {
    for (const Move& move : schedule.moves) {
      if (move.*end == rank) {
        list(move.chunk);
      }
    }
  }
  for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
    list(chunk);
  }
  return order;
}

bool Program::receives(int chunk) const {
  return std::any_of(lanes[chunk].begin(), lanes[chunk].end(),
                     [](const LaneStep& step) { return !step.receives.empty(); });
}

std::shared_ptr<const Program> compile(const Schedule& schedule, int rank) {
  const std::vector<bool> completing = completing_moves(schedule);
  auto program = std::make_shared<Program>();
  program->schedule = schedule;
  program->hash = hash_of(schedule);
  program->identity = Fnv().add(program->hash).add(schedule.algorithm).value();
  program->rank = rank;
  program->lanes.resize(schedule.chunks);
  program->order = order_of_chunks(schedule, rank);
  for (size_t i = 0; i < schedule.moves.size(); ++i) {
    const Move& move = schedule.moves[i];
    auto& lane = program->lanes[move.chunk];
    if (move.src == rank) {
      lane_step(lane, move.step).sends.push_back(move.dst);
    }
    if (move.dst == rank) {
      LaneStep& step = lane_step(lane, move.step);
      step.receives.push_back(move.src);
      step.reduces = move.reduce;
      step.completes = completing[i];
    }
  }
  for (auto& lane : program->lanes) {
    for (LaneStep& step : lane) {
      std::sort(step.receives.begin(), step.receives.end());
    }
  }
  name_operands(*program);
  const Move* const last = schedule.moves.data() + schedule.moves.size();
  for (const Move* move = schedule.moves.data(); move != last;) {
    const StepMoves step = step_from(schedule, move);
    take_turns(*program, step);
    move = step.end;
  }
  return program;
}

}  // namespace dpcore
