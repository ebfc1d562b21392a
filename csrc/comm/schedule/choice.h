// Which algorithm "auto" means where data has to travel as messages.
//
// Every algorithm that the collective has is priced once, at the first use of the collective, by
// the cost model with the constants that the ranks agreed on when they met; then a choice is a
// comparison of a few lines, fixed + bytes * slope. All ranks choose alike, since all of it is a
// function of what they agree on.
//
// Ordered algorithms give the same bits as within a host, whatever the layout. One that is not is
// taken only where it is expected to be clearly faster (kWorth), and never when the communicator
// is deterministic.
//
// Threads: under the communicator's submission lock. Owns the estimates of its group.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "comm/schedule/cost_model.h"

namespace dpcore {

class AlgorithmChoice {
 public:
  struct Candidate {
    std::string algorithm;
    bool allowed = true;  // by deterministic=True
    bool ordered = true;
    Estimate estimate;
  };

  AlgorithmChoice(std::vector<int> hosts, const CostConstants& constants, bool deterministic)
      : hosts_(std::move(hosts)), constants_(constants), deterministic_(deterministic) {}

  // `bytes` are those in the whole buffer, or in all ranks' parts together. `ordered`: as if the
  // communicator were deterministic.
  const std::string& choose(Collective collective, size_t bytes, bool ordered);
  const std::vector<Candidate>& candidates(Collective collective);
  const std::vector<int>& hosts() const { return hosts_; }

  // How much of the time of the best ordered one an algorithm that is not ordered may take.
  static constexpr double kWorth = 0.8;

 private:
  std::vector<int> hosts_;
  CostConstants constants_;
  bool deterministic_;
  std::array<std::vector<Candidate>, kCollectiveCount> candidates_;
};

}  // namespace dpcore
