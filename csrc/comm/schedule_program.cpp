// From the list of moves to the lanes of one rank.
#include "comm/schedule_program.h"

#include <algorithm>

#include "comm/schedule_check.h"

namespace dpcore {
namespace {

void mix(uint64_t& hash, uint64_t value) {
  hash = (hash ^ value) * 0x100000001b3ull;  // FNV-1a, a word at a time
}

uint64_t hash_of(const Schedule& schedule) {
  uint64_t hash = 0xcbf29ce484222325ull;
  mix(hash, static_cast<uint64_t>(schedule.collective));
  mix(hash, static_cast<uint64_t>(schedule.world));
  mix(hash, static_cast<uint64_t>(schedule.chunks));
  mix(hash, static_cast<uint64_t>(schedule.root));
  for (const Move& move : schedule.moves) {
    mix(hash, static_cast<uint64_t>(move.step));
    mix(hash, static_cast<uint64_t>(move.src));
    mix(hash, static_cast<uint64_t>(move.dst));
    mix(hash, static_cast<uint64_t>(move.chunk) * 2 + (move.reduce ? 1 : 0));
  }
  return hash;
}

LaneStep& lane_step(std::vector<LaneStep>& lane, int step) {
  if (lane.empty() || lane.back().step != step) {
    lane.emplace_back();
    lane.back().step = step;
  }
  return lane.back();
}

}  // namespace

bool Program::receives(int chunk) const {
  return std::any_of(lanes[chunk].begin(), lanes[chunk].end(),
                     [](const LaneStep& step) { return !step.receives.empty(); });
}

std::shared_ptr<const Program> compile(const Schedule& schedule, int rank) {
  check(schedule);
  const std::vector<bool> completing = completing_moves(schedule);
  auto program = std::make_shared<Program>();
  program->schedule = schedule;
  program->hash = hash_of(schedule);
  program->rank = rank;
  program->lanes.resize(schedule.chunks);
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
  return program;
}

}  // namespace dpcore
