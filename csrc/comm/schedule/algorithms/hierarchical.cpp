// Within a host first, and only what is left between hosts: for groups in which memory is near and
// the network is far.
//
// Vocabulary: ranks that share a host are mates. The buffer is cut in H * m chunks (H hosts, m
// mates on the largest). Each host has a *speaker* for each chunk, another mate for the next one,
// so that all of them work; each chunk has a *home*, the host that holds its result first, another
// host for the next one, so that all links carry the same.
//
//   all_reduce      1. mates give the chunk to their speaker, who adds
//                   2. speakers give their host's sum to the speaker of the home, who adds
//                   3. it gives the result to the other speakers
//                   4. speakers give it to their mates
//   reduce          1. and 2. the same, but in the root's host the root is always the speaker;
//                   3. the home gives the result to the root
//   broadcast       1. the root gives the chunk to its mates and to the home
//                   2. the home's speaker gives it to the other speakers   3. they to their mates
//   reduce_scatter  a chunk per rank: 1. every host adds for it   2. the speakers give it to its
//   rank all_gather      1. every rank to its mates and to a speaker of each other host   2. as
//   above
//
// Cost of an all_reduce of S between hosts: 2(H-1)/H S out of every host and as much into it,
// however many ranks it has; with two_shot every rank would send that much over the link that it
// shares with its mates. Within a host it is 2(n-1)/n S per rank, in memory.
//
// The sum of a host is rounded before it meets the others: repeatable, not ordered, unless no host
// has two ranks. When it loses: few bytes, since there are four steps instead of two.
#include <algorithm>
#include <map>

#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {
namespace {

class Hosts {
 public:
  explicit Hosts(const std::vector<int>& host_of_rank) : host_of_(host_of_rank.size()) {
    std::map<int, int> numbers;
    for (size_t r = 0; r < host_of_rank.size(); ++r) {
      const int next = static_cast<int>(mates_.size());
      const int host = numbers.emplace(host_of_rank[r], next).first->second;
      if (host == next) mates_.emplace_back();
      host_of_[r] = host;
      mates_[static_cast<size_t>(host)].push_back(static_cast<int>(r));
    }
  }
  int count() const { return static_cast<int>(mates_.size()); }
  int world() const { return static_cast<int>(host_of_.size()); }
  int of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  const std::vector<int>& mates(int host) const { return mates_[static_cast<size_t>(host)]; }
  int speaker(int host, int turn) const {
    const std::vector<int>& ranks = mates(host);
    return ranks[static_cast<size_t>(turn) % ranks.size()];
  }
  // The chunks of a buffer, each with a home and a turn of the speakers.
  int chunks() const { return count() * largest(); }
  int home_of(int chunk) const { return chunk % count(); }
  int speaker_of(int chunk, int host) const { return speaker(host, chunk / count()); }
  // Where a root gives or takes everything, nobody else speaks for its host.
  int speaker_of(int chunk, int host, int root) const {
    return host == of(root) ? root : speaker_of(chunk, host);
  }
  int index_among_mates(int rank) const {
    const std::vector<int>& ranks = mates(of(rank));
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
  int largest() const {
    size_t most = 0;
    for (const auto& ranks : mates_) most = std::max(most, ranks.size());
    return static_cast<int>(most);
  }

 private:
  std::vector<int> host_of_;
  std::vector<std::vector<int>> mates_;
};

class Builder {
 public:
  explicit Builder(int chunks) { plan_.chunks = chunks; }
  void give(int step, int src, int dst, int chunk, bool reduce) {
    if (src != dst) plan_.moves.push_back({step, src, dst, chunk, reduce});
  }
  void gather_sum(int step, const std::vector<int>& mates, int at, int chunk) {
    for (const int mate : mates) give(step, mate, at, chunk, true);
  }
  void spread(int step, int from, const std::vector<int>& mates, int chunk) {
    for (const int mate : mates) give(step, from, mate, chunk, false);
  }
  // Without the steps in which nothing happens, since no host has mates, say.
  Plan finish() {
    std::map<int, int> numbers;
    for (const Move& move : plan_.moves) numbers[move.step] = 0;
    int next = 0;
    for (auto& [step, number] : numbers) number = next++;
    for (Move& move : plan_.moves) move.step = numbers[move.step];
    return std::move(plan_);
  }

 private:
  Plan plan_;
};

}  // namespace

Plan hierarchical_all_reduce(const std::vector<int>& host_of_rank, int) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.chunks());
  for (int chunk = 0; chunk < hosts.chunks(); ++chunk) {
    const int home = hosts.speaker_of(chunk, hosts.home_of(chunk));
    for (int host = 0; host < hosts.count(); ++host) {
      const int speaker = hosts.speaker_of(chunk, host);
      plan.gather_sum(0, hosts.mates(host), speaker, chunk);
      plan.give(1, speaker, home, chunk, true);
      plan.give(2, home, speaker, chunk, false);
      plan.spread(3, speaker, hosts.mates(host), chunk);
    }
  }
  return plan.finish();
}

Plan hierarchical_reduce(const std::vector<int>& host_of_rank, int root) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.chunks());
  for (int chunk = 0; chunk < hosts.chunks(); ++chunk) {
    const int home = hosts.speaker_of(chunk, hosts.home_of(chunk), root);
    for (int host = 0; host < hosts.count(); ++host) {
      const int speaker = hosts.speaker_of(chunk, host, root);
      plan.gather_sum(0, hosts.mates(host), speaker, chunk);
      if (speaker != root) plan.give(1, speaker, home, chunk, true);
    }
    plan.give(2, home, root, chunk, true);
  }
  return plan.finish();
}

Plan hierarchical_broadcast(const std::vector<int>& host_of_rank, int root) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.chunks());
  for (int chunk = 0; chunk < hosts.chunks(); ++chunk) {
    const int home = hosts.speaker_of(chunk, hosts.home_of(chunk), root);
    plan.give(0, root, home, chunk, false);
    for (int host = 0; host < hosts.count(); ++host) {
      const int speaker = hosts.speaker_of(chunk, host, root);
      if (speaker != root && speaker != home) plan.give(1, home, speaker, chunk, false);
      plan.spread(speaker == root ? 0 : 2, speaker, hosts.mates(host), chunk);
    }
  }
  return plan.finish();
}

Plan hierarchical_reduce_scatter(const std::vector<int>& host_of_rank, int) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.world());
  for (int rank = 0; rank < hosts.world(); ++rank) {
    for (int host = 0; host < hosts.count(); ++host) {
      const int speaker = hosts.speaker(host, hosts.index_among_mates(rank));
      plan.gather_sum(0, hosts.mates(host), speaker, rank);
      plan.give(1, speaker, rank, rank, true);
    }
  }
  return plan.finish();
}

Plan hierarchical_all_gather(const std::vector<int>& host_of_rank, int) {
  const Hosts hosts(host_of_rank);
  Builder plan(hosts.world());
  for (int rank = 0; rank < hosts.world(); ++rank) {
    plan.spread(0, rank, hosts.mates(hosts.of(rank)), rank);
    for (int host = 0; host < hosts.count(); ++host) {
      if (host == hosts.of(rank)) continue;
      const int speaker = hosts.speaker(host, hosts.index_among_mates(rank));
      plan.give(0, rank, speaker, rank, false);
      plan.spread(1, speaker, hosts.mates(host), rank);
    }
  }
  return plan.finish();
}

}  // namespace dpcore::algorithms
