// Few messages are on their way at a time (the executor's window): a list does.
#include "comm/transport/link.h"

#include <algorithm>

#include "comm/base/clock.h"

namespace dpcore {
namespace {

// Of a peer that is gone: several checks of the engine.
constexpr int64_t kTurnNs = 200'000'000;
constexpr int64_t kCheckNs = 5'000'000;  // a check takes less

enum class Draw : uint64_t { jitter = 1, loss = 2 };

// splitmix64: an even number in [0, 1) from a seed and what it is for.
double draw(uint64_t seed, uint64_t pair, uint64_t number, Draw purpose) {
  uint64_t x = seed;
  for (const uint64_t part : {pair, number, static_cast<uint64_t>(purpose)}) {
    x += part + 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-53;
}

int64_t duration_ns(size_t bytes, double bytes_per_s) {
  return bytes_per_s > 0 ? to_ns(static_cast<double>(bytes) / bytes_per_s) : 0;
}

}  // namespace

Link::Ticket Link::send(int peer, size_t bytes, int priority, int64_t now) {
  const LinkSpeed& link = settings_.to[peer];
  const uint64_t pair = static_cast<uint64_t>(settings_.rank) << 32 | static_cast<uint32_t>(peer);
  const uint64_t number = sent_[peer]++;
  double latency = link.latency_s;
  if (link.jitter_s > 0) {
    latency += link.jitter_s * (2 * draw(settings_.seed, pair, number, Draw::jitter) - 1);
  }
  const bool is_lost = link.loss > 0 && draw(settings_.seed, pair, number, Draw::loss) < link.loss;
  latency += is_lost ? 2 * link.latency_s : 0;
  messages_.push_back(
      {next_ticket_, peer, priority, bytes, now, to_ns(std::max(0.0, latency)), is_lost, kUnknown});
  return next_ticket_++;
}

int64_t Link::arrival_ns(Ticket ticket, int64_t now) {
  let_pass(now);
  const auto found = std::find_if(messages_.begin(), messages_.end(),
                                  [&](const Message& m) { return m.ticket == ticket; });
  const int64_t arrival = found == messages_.end() ? kUnknown : found->arrival_ns;
  if (arrival != kUnknown) {
    messages_.erase(found);
  }
  return arrival;
}

int64_t Link::earliest_ns() const {
  int64_t earliest = egress_free_ns_;  // what the NIC has not taken arrives later
  for (const Message& message : messages_) {
    earliest = std::min(earliest, message.arrival_ns);
  }
  return earliest;
}

void Link::withdraw(Ticket ticket) {
  std::erase_if(messages_, [&](const Message& m) { return m.ticket == ticket; });
}

// All that the egress took until now.
void Link::let_pass(int64_t now) {
  while (true) {
    const auto waits = [](const Message& m) { return m.left > 0; };
    const auto first = std::find_if(messages_.begin(), messages_.end(), waits);
    if (first == messages_.end()) {
      return;
    }
    const int64_t moment = std::max(egress_free_ns_, first->ready_ns);
    if (moment > now) {
      return;
    }
    auto next = first;
    for (auto other = first + 1; other != messages_.end() && other->ready_ns <= moment; ++other) {
      next = waits(*other) && other->priority > next->priority ? other : next;
    }
    take_fragment(*next, moment);
  }
}

void Link::take_fragment(Message& message, int64_t moment) {
  const size_t fragment = std::min(message.left, kFragmentBytes);
  const int64_t transfer = duration_ns(fragment, settings_.to[message.peer].bytes_per_s);
  egress_free_ns_ = moment + transfer * (message.is_lost ? 2 : 1);
  message.left -= fragment;
  if (message.left == 0) {
    message.arrival_ns = egress_free_ns_ + message.latency_ns;
  }
}

int64_t Link::ingress_free_ns(int peer, int64_t now) const {
  const bool stands_back = has_turn_ >= 0 && has_turn_ != peer && now < turn_ends_ns_;
  return stands_back ? std::max(ingress_free_ns_, now + kTurnNs / 10) : ingress_free_ns_;
}

bool Link::keeps_from(int peer, int64_t now) {
  const bool is_taken = has_turn_ >= 0 && now < turn_ends_ns_;
  if (is_taken && has_turn_ != peer) {
    return true;
  }
  if (is_taken && turn_ends_ns_ - now > kTurnNs - kCheckNs) {
    return true;  // another operation asks in the same check
  }
  const bool is_answered = is_taken && was_free_;
  has_turn_ = is_answered ? -1 : peer;
  was_free_ = now >= ingress_free_ns_;
  turn_ends_ns_ = now + kTurnNs;
  return !is_answered;
}

// What a lone sender sent took the ingress while it came: only more than that has to wait.
void Link::receive(int peer, size_t bytes, size_t left, int64_t due_ns) {
  if (peer == has_turn_) {
    has_turn_ = -1;  // it had something, and may have more
  }
  const int64_t transfer = duration_ns(bytes, settings_.ingress_bytes_per_s);
  const int64_t begin = due_ns - duration_ns(bytes + left, settings_.ingress_bytes_per_s);
  ingress_free_ns_ = std::max(ingress_free_ns_, begin) + transfer;
}

}  // namespace dpcore
