// A network card as slow as you say: bandwidth, latency, jitter and loss, so that a laptop shows
// what a network of 1, 10 or 100 Gbit/s would. Arithmetic only; transport_paced waits by it.
//
// What leaves a rank passes its egress one message after the other, at the rate of the link to the
// receiver; what arrives passes the receiver's ingress likewise, so several senders share it.
// Every message takes the latency, plus a jitter drawn evenly from [-jitter, jitter]; a lost one
// takes the link twice and a round trip more. Jitter and loss are functions of the seed, the pair
// of ranks and the number of the message: the same in every run.
//
// Threads: under the engine's seat. One per endpoint; all its communicators share the card.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dpcore {

struct LinkSpeed {
  double bytes_per_s = 0;  // 0: no limit
  double latency_s = 0;
  double jitter_s = 0;
  double loss = 0;  // probability per message
};

struct LinkSettings {
  int rank = 0;
  std::vector<LinkSpeed> to;       // by rank
  double ingress_bytes_per_s = 0;  // 0: no limit
  uint64_t seed = 0;
};

class Link {
 public:
  explicit Link(LinkSettings settings)
      : settings_(std::move(settings)), sent_(settings_.to.size(), 0) {}

  // When the last byte of a message that is ready now will have arrived; takes the egress.
  int64_t send(int peer, size_t bytes, int64_t now);
  // From when on bytes may be taken in.
  int64_t ingress_free_ns() const { return ingress_free_ns_; }
  void receive(size_t bytes, int64_t now);
  double latency_s(int peer) const { return settings_.to[peer].latency_s; }
  // What the link to a peer holds when it is busy.
  double bytes_on_the_way(int peer) const {
    return settings_.to[peer].bytes_per_s * settings_.to[peer].latency_s;
  }

 private:
  LinkSettings settings_;
  int64_t egress_free_ns_ = 0;
  int64_t ingress_free_ns_ = 0;
  std::vector<uint64_t> sent_;  // messages, by peer
};

}  // namespace dpcore
