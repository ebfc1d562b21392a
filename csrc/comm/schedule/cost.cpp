// One pass over the moves, step by step. The schedule is taken to be proved (check.h).
#include "comm/schedule/cost.h"

#include <algorithm>
#include <utility>

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

namespace {

struct Load {  // of one rank in one step
  double messages_s = 0;
  double bytes_s = 0;  // per byte of the buffer
};

struct Nic {  // of one host in one step, per byte of the buffer
  double out = 0;
  double in = 0;
};

struct Transfer {  // of one move between two hosts
  int turn = 0;    // how many moves its rank sends before it
  size_t from = 0;
  size_t to = 0;
  double share = 0;
};

// When the last NIC is through, per byte of the buffer. NICs send what their ranks hand them in
// turns, and take in what arrives one message after the other.
double time_of(std::vector<Transfer>& transfers, size_t nics) {
  std::stable_sort(transfers.begin(), transfers.end(),
                   [](const Transfer& a, const Transfer& b) { return a.turn < b.turn; });
  std::vector<Nic> busy_until(nics);
  std::vector<std::pair<double, const Transfer*>> arrivals;
  arrivals.reserve(transfers.size());
  for (const Transfer& transfer : transfers) {
    arrivals.emplace_back(busy_until[transfer.from].out += transfer.share, &transfer);
  }
  std::sort(arrivals.begin(), arrivals.end());
  double last = 0;
  for (const auto& [moment, transfer] : arrivals) {
    double& in = busy_until[transfer->to].in;
    in = std::max(in, moment - transfer->share) + transfer->share;
    last = std::max(last, in);
  }
  return last;
}

class Step {
 public:
  Step(size_t ranks, size_t nics) : loads_(ranks), nics_(nics), turns_(ranks) {}

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
      const auto from = static_cast<size_t>(hosts[src]);
      const auto to = static_cast<size_t>(hosts[dst]);
      nics_[from].out += share;
      nics_[to].in += share;
      transfers_.push_back({turns_[src]++, from, to, share});
    } else {
      loads_[src].bytes_s += share * way.byte_s;
      loads_[dst].bytes_s += share * way.byte_s;
    }
    loads_[dst].bytes_s += move.reduce ? share * constants.added_byte_s : 0;
  }

  void add_to(Estimate& total, const CostConstants& constants) {
    Load busiest;
    for (const Load& load : loads_) {
      busiest.messages_s = std::max(busiest.messages_s, load.messages_s);
      busiest.bytes_s = std::max(busiest.bytes_s, load.bytes_s);
    }
    double carried = 0;
    for (const Nic& nic : nics_) {
      carried = std::max({carried, nic.out, nic.in});
    }
    ++total.steps;
    total.fixed_s += step_s_ + busiest.messages_s;
    total.per_byte_s +=
        busiest.bytes_s + time_of(transfers_, nics_.size()) * constants.network.byte_s;
    total.network_share += carried;
  }

 private:
  double step_s_ = 0;
  std::vector<Load> loads_;
  std::vector<Nic> nics_;
  std::vector<int> turns_;  // by rank
  std::vector<Transfer> transfers_;
};

}  // namespace

Estimate estimate(const Schedule& schedule, const std::vector<int>& hosts,
                  const CostConstants& constants) {
  // An all_to_all names a chunk for each pair of ranks: of a buffer there are as many as ranks.
  const bool pairs = schedule.collective == Collective::all_to_all;
  const double share = 1.0 / (pairs ? schedule.world : schedule.chunks);
  const auto nics = static_cast<size_t>(*std::max_element(hosts.begin(), hosts.end())) + 1;
  Estimate total;
  for (auto move = schedule.moves.begin(); move != schedule.moves.end();) {
    Step step(hosts.size(), nics);
    const int number = move->step;
    for (; move != schedule.moves.end() && move->step == number; ++move) {
      step.add(*move, hosts, share, constants);
    }
    step.add_to(total, constants);
  }
  return total;
}

}  // namespace dpcore
