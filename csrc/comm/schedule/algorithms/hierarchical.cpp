// Within a host first, and only what is left between hosts: for groups in which memory is near and
// the network is far.
//
// Vocabulary: ranks that share a host are local peers. The buffer is cut in H * m chunks (H hosts,
// m ranks on the largest). Each host has a *leader* for each chunk, another rank for the next one,
// so that all of them work; each chunk has a *home*, the host that holds its result first, another
// host for the next one, so that all links carry the same.
//
//   all_reduce      1. local peers give the chunk to their leader, who adds
//                   2. leaders give their host's sum to the leader of the home, who adds
//                   3. it gives the result to the other leaders
//                   4. leaders give it to their local peers
//   reduce          1. and 2. the same, but in the root's host the root is always the leader;
//                   3. the home gives the result to the root
//   broadcast       1. the root gives the chunk to its local peers and to the home
//                   2. the home's leader gives it to the other leaders
//                   3. they to their local peers
//   reduce_scatter  a chunk per rank: 1. every host adds for it   2. the leaders give it to its
//   rank all_gather      1. every rank to its local peers and to a leader of each other host
//                   2. as above
//
// Cost of an all_reduce of S between hosts: 2(H-1)/H S out of every host and as much into it,
// however many ranks it has; with two_shot every rank would send that much over the link that it
// shares with its local peers. Within a host it is 2(n-1)/n S per rank, in memory.
//
// The sum of a host is rounded before it is added to the others: repeatable, not ordered, unless no
// host has two ranks. When it loses: few bytes, since there are four steps instead of two.
#include <algorithm>
#include <map>
#include <utility>

#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {
namespace {

class Hosts {
 public:
  explicit Hosts(const std::vector<int>& host_of_rank) : host_of_(host_of_rank.size()) {
    std::map<int, int> numbers;
    for (size_t r = 0; r < host_of_rank.size(); ++r) {
      const int next = static_cast<int>(ranks_.size());
      const int host = numbers.emplace(host_of_rank[r], next).first->second;
      if (host == next) {
        ranks_.emplace_back();
      }
      host_of_[r] = host;
      ranks_[static_cast<size_t>(host)].push_back(static_cast<int>(r));
    }
  }
  int count() const { return static_cast<int>(ranks_.size()); }
  int world() const { return static_cast<int>(host_of_.size()); }
  int of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_[static_cast<size_t>(host)]; }
  int leader(int host, int turn) const {
    const std::vector<int>& ranks = ranks_of(host);
    return ranks[static_cast<size_t>(turn) % ranks.size()];
  }
  // The chunks of a buffer, each with a home and a turn of the leaders.
  int chunks() const { return count() * largest(); }
  int home_of(int chunk) const { return chunk % count(); }
  int leader_of(int chunk, int host) const { return leader(host, chunk / count()); }
  // Every host with every other one and at last with itself, each beginning with the one on its
  // right: if all began with host 0, its card would take in what all others send.
  std::vector<std::pair<int, int>> pairs() const {
    std::vector<std::pair<int, int>> found;
    for (int ahead = 1; ahead <= count(); ++ahead) {
      for (int host = 0; host < count(); ++host) {
        found.emplace_back(host, (host + ahead) % count());
      }
    }
    return found;
  }
  // Where a root gives or takes everything, it is the leader of its host.
  int leader_of(int chunk, int host, int root) const {
    return host == of(root) ? root : leader_of(chunk, host);
  }
  int index_on_host(int rank) const {
    const std::vector<int>& ranks = ranks_of(of(rank));
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
  int largest() const {
    size_t most = 0;
    for (const auto& ranks : ranks_) {
      most = std::max(most, ranks.size());
    }
    return static_cast<int>(most);
  }

 private:
  std::vector<int> host_of_;
  std::vector<std::vector<int>> ranks_;
};

class Builder {
 public:
  explicit Builder(int chunks) { plan_.chunks = chunks; }
  void give(int step, int src, int dst, int chunk, bool reduce) {
    if (src != dst) {
      plan_.moves.push_back({step, src, dst, chunk, reduce});
    }
  }
  void gather_sum(int step, const std::vector<int>& ranks, int at, int chunk) {
    for (const int rank : ranks) {
      give(step, rank, at, chunk, true);
    }
  }
  void spread(int step, int from, const std::vector<int>& ranks, int chunk) {
    for (const int rank : ranks) {
      give(step, from, rank, chunk, false);
    }
  }
  // Without the steps in which nothing happens, since every rank is alone on its host, say.
  Plan finish() {
    std::map<int, int> numbers;
    for (const Move& move : plan_.moves) {
      numbers[move.step] = 0;
    }
    int next = 0;
    for (auto& [step, number] : numbers) {
      number = next++;
    }
    for (Move& move : plan_.moves) {
      move.step = numbers[move.step];
    }
    return std::move(plan_);
  }

 private:
  Plan plan_;
};

}  // namespace

Plan hierarchical_all_reduce(const std::vector<int>& host_of_rank, int) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.chunks());
  for (int begin = 0; begin < hosts.chunks(); begin += hosts.count()) {
    for (const auto& [host, home] : hosts.pairs()) {
      const int chunk = begin + home;
      const int leader = hosts.leader_of(chunk, host);
      const int leader_at_home = hosts.leader_of(chunk, home);
      plan.gather_sum(0, hosts.ranks_of(host), leader, chunk);
      plan.give(1, leader, leader_at_home, chunk, true);
      plan.give(2, leader_at_home, leader, chunk, false);
      plan.spread(3, leader, hosts.ranks_of(host), chunk);
    }
  }
  return plan.finish();
}

Plan hierarchical_reduce(const std::vector<int>& host_of_rank, int root) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.chunks());
  for (int chunk = 0; chunk < hosts.chunks(); ++chunk) {
    const int home = hosts.leader_of(chunk, hosts.home_of(chunk), root);
    for (int host = 0; host < hosts.count(); ++host) {
      const int leader = hosts.leader_of(chunk, host, root);
      plan.gather_sum(0, hosts.ranks_of(host), leader, chunk);
      if (leader != root) {
        plan.give(1, leader, home, chunk, true);
      }
    }
    plan.give(2, home, root, chunk, true);
  }
  return plan.finish();
}

Plan hierarchical_broadcast(const std::vector<int>& host_of_rank, int root) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.chunks());
  for (int chunk = 0; chunk < hosts.chunks(); ++chunk) {
    const int home = hosts.leader_of(chunk, hosts.home_of(chunk), root);
    plan.give(0, root, home, chunk, false);
    for (int host = 0; host < hosts.count(); ++host) {
      const int leader = hosts.leader_of(chunk, host, root);
      if (leader != root && leader != home) {
        plan.give(1, home, leader, chunk, false);
      }
      plan.spread(leader == root ? 0 : 2, leader, hosts.ranks_of(host), chunk);
    }
  }
  return plan.finish();
}

Plan hierarchical_reduce_scatter(const std::vector<int>& host_of_rank, int) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.world());
  for (const auto& [host, home] : hosts.pairs()) {
    for (const int rank : hosts.ranks_of(home)) {
      const int leader = hosts.leader(host, hosts.index_on_host(rank));
      plan.gather_sum(0, hosts.ranks_of(host), leader, rank);
      plan.give(1, leader, rank, rank, true);
    }
  }
  return plan.finish();
}

Plan hierarchical_all_gather(const std::vector<int>& host_of_rank, int) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.world());
  for (const auto& [home, host] : hosts.pairs()) {
    for (const int rank : hosts.ranks_of(home)) {
      if (host == home) {
        plan.spread(0, rank, hosts.ranks_of(home), rank);
        continue;
      }
      const int leader = hosts.leader(host, hosts.index_on_host(rank));
      plan.give(0, rank, leader, rank, false);
      plan.spread(1, leader, hosts.ranks_of(host), rank);
    }
  }
  return plan.finish();
}

}  // namespace dpcore::algorithms
