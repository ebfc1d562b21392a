// Counting a list of moves: per rank for the totals, per step for the critical path.
#include "comm/schedule/cost.h"

#include <algorithm>

namespace dpcore {
namespace {

size_t largest(const std::vector<size_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

// What each rank does within one step.
struct StepTraffic {
  explicit StepTraffic(size_t world) : sent(world), received(world), reduced(world) {}
  std::vector<size_t> sent;
  std::vector<size_t> received;
  std::vector<size_t> reduced;
};

void add_step(const StepTraffic& step, Cost& cost) {
  for (size_t rank = 0; rank < step.sent.size(); ++rank) {
    cost.sent_bytes[rank] += step.sent[rank];
    cost.received_bytes[rank] += step.received[rank];
  }
  cost.critical_bytes += std::max(largest(step.sent), largest(step.received));
  cost.critical_reduced_bytes += largest(step.reduced);
  ++cost.steps;
}

}  // namespace

Cost cost_of(const Schedule& schedule, size_t count, size_t element_bytes) {
  const size_t world = static_cast<size_t>(schedule.world);
  Cost cost;
  cost.sent_bytes.resize(world);
  cost.received_bytes.resize(world);
  for (auto move = schedule.moves.begin(); move != schedule.moves.end();) {
    StepTraffic traffic(world);
    const int step = move->step;
    for (; move != schedule.moves.end() && move->step == step; ++move) {
      const size_t elements = is_on_whole(schedule.collective)
                                  ? chunk_range(count, schedule.chunks, move->chunk).size()
                                  : count;
      const size_t bytes = elements * element_bytes;
      traffic.sent[static_cast<size_t>(move->src)] += bytes;
      traffic.received[static_cast<size_t>(move->dst)] += bytes;
      if (move->reduce) {
        traffic.reduced[static_cast<size_t>(move->dst)] += bytes;
      }
    }
    add_step(traffic, cost);
  }
  cost.max_bytes_per_rank = std::max(largest(cost.sent_bytes), largest(cost.received_bytes));
  return cost;
}

double predict_seconds(const Cost& cost, double alpha, double beta, double gamma) {
  return cost.steps * alpha + static_cast<double>(cost.critical_bytes) * beta +
         static_cast<double>(cost.critical_reduced_bytes) * gamma;
}

}  // namespace dpcore
