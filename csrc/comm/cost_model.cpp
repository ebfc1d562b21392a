// One pass over the moves, step by step. The schedule is taken to be proved (schedule_check.h).
#include "comm/cost_model.h"

#include <algorithm>

namespace dpcore {
namespace {

struct Load {  // of one rank in one step
  double messages_s = 0;
  double bytes_s = 0;  // per byte of the buffer
};

struct Card {  // of one host in one step, per byte of the buffer
  double out = 0;
  double in = 0;
};

class Step {
 public:
  Step(size_t ranks, size_t cards) : loads_(ranks), cards_(cards) {}

  void add(const Move& move, const std::vector<int>& hosts, double share,
           const CostConstants& constants) {
    const auto src = static_cast<size_t>(move.src);
    const auto dst = static_cast<size_t>(move.dst);
    const bool remote = hosts[src] != hosts[dst];
    const WayCosts& way = remote ? constants.network : constants.memory;
    step_s_ = std::max(step_s_, way.step_s);
    loads_[src].messages_s += way.message_s;
    loads_[dst].messages_s += way.message_s;
    if (remote) {
      cards_[static_cast<size_t>(hosts[src])].out += share;
      cards_[static_cast<size_t>(hosts[dst])].in += share;
    } else {
      loads_[src].bytes_s += share * way.byte_s;
      loads_[dst].bytes_s += share * way.byte_s;
    }
    loads_[dst].bytes_s += move.reduce ? share * constants.added_byte_s : 0;
  }

  void add_to(Estimate& total, const CostConstants& constants) const {
    Load busiest;
    for (const Load& load : loads_) {
      busiest.messages_s = std::max(busiest.messages_s, load.messages_s);
      busiest.bytes_s = std::max(busiest.bytes_s, load.bytes_s);
    }
    double carried = 0;
    for (const Card& card : cards_) {
      carried = std::max({carried, card.out, card.in});
    }
    ++total.steps;
    total.fixed_s += step_s_ + busiest.messages_s;
    total.per_byte_s += busiest.bytes_s + carried * constants.network.byte_s;
    total.network_share += carried;
  }

 private:
  double step_s_ = 0;
  std::vector<Load> loads_;
  std::vector<Card> cards_;
};

}  // namespace

Estimate estimate(const Schedule& schedule, const std::vector<int>& hosts,
                  const CostConstants& constants) {
  // An all_to_all names a chunk for each pair of ranks: of a buffer there are as many as ranks.
  const bool pairs = schedule.collective == Collective::all_to_all;
  const double share = 1.0 / (pairs ? schedule.world : schedule.chunks);
  const auto cards = static_cast<size_t>(*std::max_element(hosts.begin(), hosts.end())) + 1;
  Estimate total;
  for (auto move = schedule.moves.begin(); move != schedule.moves.end();) {
    Step step(hosts.size(), cards);
    const int number = move->step;
    for (; move != schedule.moves.end() && move->step == number; ++move) {
      step.add(*move, hosts, share, constants);
    }
    step.add_to(total, constants);
  }
  return total;
}

}  // namespace dpcore
