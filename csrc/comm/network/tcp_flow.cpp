// See tcp_flow.h.
#include "comm/network/tcp_flow.h"

#include <algorithm>
#include <cmath>

namespace dpcore {
namespace {

constexpr double kLeastBytes = 32 << 10;
constexpr double kLateLooksNs = 3 * 10e6;
constexpr double kEarlyLookNs = 0.5e6;  // where messages have priorities
constexpr int64_t kShortestPauseNs = 30'000;
constexpr int64_t kForgotten = 32;  // of the lateness, one part at each look

}  // namespace

bool TcpFlow::has_room(const TcpLoad& load, int priority, bool has_priorities, int64_t now) {
  note_look(now);
  const double excess = load.bytes_per_ns > 0 ? too_many(load, has_priorities) : 0;
  if (excess <= 0 || priority > priority_) {
    priority_ = priority;
    waits_ = false;
    return true;
  }
  free_ns_ = now + std::max(kShortestPauseNs, static_cast<int64_t>(excess / load.bytes_per_ns));
  waits_ = true;
  return false;
}

// Bytes that have to leave, or to be confirmed, before there is room.
double TcpFlow::too_many(const TcpLoad& load, bool has_priorities) {
  const double travels = 2 * load.bytes_per_ns * load.round_trip_ns;
  if (!has_priorities) {
    return load.on_the_way - std::max(kLeastBytes, travels + load.bytes_per_ns * kLateLooksNs);
  }
  const double needed = std::max(kLeastBytes, load.bytes_per_ns * kEarlyLookNs);
  const double wanted = load.bytes_per_ns * static_cast<double>(late_ns_);
  const double queue = std::max(needed, std::min(wanted, most_unsent_));
  if (const double unsent = std::clamp(queue, least_unsent_, most_unsent_);
      std::abs(unsent - unsent_) > kLeastBytes) {
    unsent_ = unsent;
  }
  return std::max(load.on_the_way - travels - std::max(needed, most_unsent_),
                  load.queued_here - queue);
}

void TcpFlow::share(size_t unsent, size_t most) {
  least_unsent_ = unsent_ = static_cast<double>(unsent);
  most_unsent_ = static_cast<double>(std::max(unsent, most));
}

// A look that comes before its time says nothing, and neither does one at which no frame waited.
void TcpFlow::note_look(int64_t now) {
  if (waits_ && now >= free_ns_) {
    waits_ = false;
    late_ns_ = std::max(now - free_ns_, late_ns_ - late_ns_ / kForgotten);
  }
}

}  // namespace dpcore
