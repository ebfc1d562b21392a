// The latency counts before the egress instead of after it: all messages are shifted by the same
// time, so every arrival is where it belongs, and the sender need not keep what has left.
#include "comm/link.h"

#include <algorithm>

#include "comm/clock.h"

namespace dpcore {
namespace {

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

int64_t Link::send(int peer, size_t bytes, int64_t now) {
  const LinkSpeed& link = settings_.to[peer];
  const uint64_t pair = static_cast<uint64_t>(settings_.rank) << 32 | static_cast<uint32_t>(peer);
  const uint64_t number = sent_[peer]++;
  double latency = link.latency_s;
  if (link.jitter_s > 0) {
    latency += link.jitter_s * (2 * draw(settings_.seed, pair, number, Draw::jitter) - 1);
  }
  int64_t transfer = duration_ns(bytes, link.bytes_per_s);
  if (link.loss > 0 && draw(settings_.seed, pair, number, Draw::loss) < link.loss) {
    latency += 2 * link.latency_s;
    transfer *= 2;
  }
  egress_free_ns_ = std::max(now + to_ns(std::max(0.0, latency)), egress_free_ns_) + transfer;
  return egress_free_ns_;
}

// What a lone sender sent took the ingress while it came: only more than that has to wait.
void Link::receive(size_t bytes, int64_t now) {
  const int64_t transfer = duration_ns(bytes, settings_.ingress_bytes_per_s);
  ingress_free_ns_ = std::max(ingress_free_ns_, now - transfer) + transfer;
}

}  // namespace dpcore
