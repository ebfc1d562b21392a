// With the defaults: the owner of a part takes it from all and gives it to all (two_shot), the
// fewest bytes in the fewest steps; hierarchical as soon as ranks share a NIC.
#include "comm/schedule/choice.h"

#include "comm/schedule/check.h"

namespace dpcore {
namespace {

// Equal estimates that were summed in another order must not look different.
constexpr double kNoise = 1e-9;

}  // namespace

const std::vector<AlgorithmChoice::Candidate>& AlgorithmChoice::candidates(Collective collective) {
  std::vector<Candidate>& list = candidates_[static_cast<size_t>(collective)];
  if (list.empty()) {
    const int world = static_cast<int>(hosts_.size());
    for (const std::string& name : algorithms_of(collective)) {
      const Schedule schedule = make_schedule(name, collective, world, 0, hosts_);
      Candidate candidate;
      candidate.algorithm = name;
      candidate.ordered = schedule.ordered || is_ordered(schedule);
      candidate.allowed = candidate.ordered || !deterministic_;
      candidate.estimate = estimate(schedule, hosts_, constants_);
      list.push_back(std::move(candidate));
    }
  }
  return list;
}

const std::string& AlgorithmChoice::choose(Collective collective, size_t bytes, bool ordered) {
  const Candidate* best = nullptr;
  double best_seconds = 0;
  for (const bool is_ordered_pass : {true, false}) {
    for (const Candidate& candidate : candidates(collective)) {
      const bool allowed = candidate.allowed && (candidate.ordered || !ordered);
      if (!allowed || candidate.ordered != is_ordered_pass) {
        continue;
      }
      const double seconds = candidate.estimate.seconds(bytes);
      const bool against_ordered = best != nullptr && best->ordered && !candidate.ordered;
      const double limit = best_seconds * (against_ordered ? kWorth : 1.0 - kNoise);
      if (best == nullptr || seconds < limit) {
        best = &candidate;
        best_seconds = seconds;
      }
    }
  }
  return best->algorithm;
}

}  // namespace dpcore
