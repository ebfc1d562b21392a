// A name may belong to some collectives only: then it is theirs, and the others choose. With the
// default costs "auto" is two_shot (the owner of a part takes it from all and gives it to all: the
// fewest bytes in the fewest steps), and hierarchical as soon as ranks share a NIC.
#include "comm/schedule/choice.h"

#include <algorithm>
#include <set>

#include "comm/base/error.h"
#include "comm/schedule/check.h"

namespace dpcore {
namespace {

constexpr std::string_view kAuto = "auto";

AskedAlgorithm parse(const std::string& text) {
  const bool literal = text.ends_with(kLiteral);
  return {literal ? text.substr(0, text.size() - kLiteral.size()) : text, literal};
}

bool is_algorithm_of(Collective collective, const std::string& name) {
  const std::vector<std::string> known = algorithms_of(collective);
  return std::find(known.begin(), known.end(), name) != known.end();
}

}  // namespace

AskedAlgorithm resolve_algorithm(Collective collective, const std::string& asked,
                                 const std::string& fallback) {
  const bool is_own = asked.empty();
  AskedAlgorithm algorithm = parse(is_own ? fallback : asked);
  if (is_own && !algorithm.is_open() && !is_algorithm_of(collective, algorithm.name)) {
    return {};
  }
  return algorithm;
}

void check_algorithm_name(const std::string& name) {
  std::set<std::string> known;
  for (int kind = 0; kind < kCollectiveCount; ++kind) {
    for (const std::string& algorithm : algorithms_of(static_cast<Collective>(kind))) {
      known.insert(algorithm);
    }
  }
  if (name != kAuto && !known.contains(parse(name).name)) {
    std::string list(kAuto);
    for (const std::string& algorithm : known) {
      list += ", " + algorithm;
    }
    throw Unsupported("algorithm '" + name + "' does not exist; there are " + list + "; '" +
                      std::string(kLiteral) +
                      "' may stand behind a name, and dpcore.algorithms_of(collective) lists "
                      "those of one collective");
  }
}

namespace {

// Equal estimates that were summed in another order must not look different.
constexpr double kNoise = 1e-9;

}  // namespace

const std::vector<AlgorithmChoice::Candidate>& AlgorithmChoice::candidates(Collective collective) {
  std::vector<Candidate>& list = candidates_[static_cast<size_t>(collective)];
  if (list.empty()) {
    const int world = static_cast<int>(hosts_.size());
    for (const std::string& name : algorithms_of(collective)) {
      list.push_back(priced(make_schedule(name, collective, world, 0, hosts_)));
    }
  }
  return list;
}

AlgorithmChoice::Candidate AlgorithmChoice::priced(const Schedule& schedule) const {
  Candidate candidate;
  candidate.algorithm = schedule.algorithm;
  candidate.ordered = schedule.ordered || is_ordered(schedule);
  candidate.allowed = candidate.ordered || !deterministic_;
  candidate.estimate = estimate(schedule, hosts_, constants_);
  return candidate;
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
