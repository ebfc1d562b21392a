// A NIC as slow as you say: bandwidth, latency, jitter and loss, so that a laptop shows
// what a network of 1, 10 or 100 Gbit/s would. Arithmetic only; PacedTransport waits by it.
//
// What leaves a rank passes its egress, one fragment of kFragmentBytes at most after the other, at
// the rate of the link to the receiver; what arrives passes the receiver's ingress likewise, so
// several senders share it. When the egress is free, it takes the next fragment of the most urgent
// message that was ready by then, so an urgent one waits for one fragment and not for what was
// ready before it. Every message takes the latency, plus a jitter drawn evenly from [-jitter,
// jitter]; a lost one takes the link twice and a round trip more. Jitter and loss are functions of
// the seed, the pair of ranks and the number of the message: the same in every run.
//
// Time is an argument. What the NIC does between two calls is worked out at the second one, with
// the moments at which messages became ready: a thread that polls too late does not slow it down.
//
// Threads: under the engine's progress lock. One per endpoint, shared by its communicators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

  // A NIC of the same rank as fast as this one, where only the ranks at these places take part.
  std::shared_ptr<Link> between(const std::vector<int>& places) const {
    LinkSettings settings = settings_;
    settings.to.clear();
    for (size_t r = 0; r < places.size(); ++r) {
      settings.to.push_back(settings_.to[static_cast<size_t>(places[r])]);
      settings.rank = places[r] == settings_.rank ? static_cast<int>(r) : settings.rank;
    }
    return std::make_shared<Link>(std::move(settings));
  }

  // A message that is ready now, and what it is called from here on.
  using Ticket = uint64_t;
  Ticket send(int peer, size_t bytes, int priority, int64_t now);
  // When its last byte will have arrived; kUnknown while the NIC has not taken it. To be asked
  // until it is known: then the NIC forgets the message.
  int64_t arrival_ns(Ticket ticket, int64_t now);
  // No message whose arrival was not known when it was asked for arrives before.
  int64_t earliest_ns() const;
  void withdraw(Ticket ticket);
  static constexpr int64_t kUnknown = INT64_MAX;
  static constexpr size_t kFragmentBytes = size_t{256} << 10;

  // From when on bytes of a peer may be taken in: later while another one, which is gone, has its
  // turn.
  int64_t ingress_free_ns(int peer, int64_t now) const;
  // Of a message whose last byte arrived at due_ns, and of which so many bytes are left to be
  // taken.
  void receive(int peer, size_t bytes, size_t left, int64_t due_ns);
  // Whether the ingress may still keep this rank from something that a peer has sent which is gone.
  // Others may keep it busy for ever: so the first question gives that peer the turn, and the
  // answer is known when the ingress has been free for it between two questions. To be asked at
  // every check, after everything that may be taken in was.
  bool keeps_from(int peer, int64_t now);

  double latency_s(int peer) const { return settings_.to[peer].latency_s; }
  // What the link to a peer holds when it is busy.
  double bytes_on_the_way(int peer) const {
    return settings_.to[peer].bytes_per_s * settings_.to[peer].latency_s;
  }

 private:
  struct Message {
    Ticket ticket = 0;
    int peer = 0;
    int priority = 0;
    size_t left = 0;  // bytes that the egress has not taken yet
    int64_t ready_ns = 0;
    int64_t latency_ns = 0;
    bool is_lost = false;
    int64_t arrival_ns = kUnknown;
  };

  void let_pass(int64_t now);
  void take_fragment(Message& message, int64_t moment);

  LinkSettings settings_;
  int64_t egress_free_ns_ = 0;
  int64_t ingress_free_ns_ = 0;
  int has_turn_ = -1;           // the peer that was asked for
  bool was_free_ = false;       // the ingress, when it was
  int64_t turn_ends_ns_ = 0;    // when it is asked for no more
  std::vector<uint64_t> sent_;  // messages, by peer
  Ticket next_ticket_ = 0;
  std::vector<Message> messages_;  // in the order in which they became ready
};

}  // namespace dpcore
