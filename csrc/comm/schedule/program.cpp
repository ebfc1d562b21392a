// From the list of moves to the lanes of one rank.
#include "comm/schedule/program.h"

#include <algorithm>

#include "comm/base/fnv.h"
#include "comm/schedule/check.h"

namespace dpcore {
namespace {

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

}  // namespace

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
  check(schedule);
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
  return program;
}

}  // namespace dpcore
