// Which algorithm a collective runs: the one that was asked for by name, or the one that "auto"
// means where data has to travel as messages.
//
// For "auto", every algorithm that the collective has is priced once, at the first use of the
// collective, by the cost model with the constants that the ranks agreed on when they met; then a
// choice is a comparison of a few lines, fixed + bytes * slope. All ranks choose alike, since all
// of it is a function of what they agree on.
//
// Ordered algorithms give the same bits as within a host, whatever the layout. One that is not is
// taken only where it is expected to be clearly faster (kWorth), and never when the communicator
// is deterministic.
//
// Threads: an AlgorithmChoice is used under the communicator's submission lock, and owns the
// estimates of its group. The functions on names are pure.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "comm/schedule/cost.h"
#include "comm/schedule/schedule.h"

namespace dpcore {

// Behind a name: run its list of moves as it stands, though there is a faster path.
inline constexpr std::string_view kLiteral = "/moves";

struct AskedAlgorithm {
  std::string name = "auto";  // without the suffix; this leaves the choice to the communicator
  bool literal = false;       // whether the suffix was there
  bool is_open() const { return name == "auto" && !literal; }
};

// What a call runs that asks for `asked`, on a communicator whose own algorithm is `fallback`: an
// empty `asked` means that one, where the collective has it, and otherwise "auto". A name that was
// asked for is not looked up: make_schedule() refuses one that the collective lacks.
AskedAlgorithm resolve_algorithm(Collective collective, const std::string& asked,
                                 const std::string& fallback);
// Throws Unsupported, listing what there is, when no collective has it.
void check_algorithm_name(const std::string& name);

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
  // What is expected of a schedule that is right.
  Candidate priced(const Schedule& schedule) const;
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
