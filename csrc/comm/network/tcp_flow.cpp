// See tcp_flow.h.
#include "comm/network/tcp_flow.h"

#include <linux/sock_diag.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>

namespace dpcore {
namespace {

constexpr int64_t kMeasuredForNs = 1'000'000;

void measure(int fd, TcpLoad& load) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_delivery_rate != 0) {
    load.bytes_per_ns = static_cast<double>(info.tcpi_delivery_rate) * 1e-9;
    load.round_trip_ns = 1e3 * info.tcpi_min_rtt;
  }
}

// Where the kernel does not say what has left this host, nothing has.
double queue_of_host(int fd, double on_the_way) {
  int unsent = 0;
  uint32_t memory[SK_MEMINFO_VARS] = {};
  socklen_t length = sizeof(memory);
  const bool says = ioctl(fd, SIOCOUTQNSD, &unsent) == 0 &&
                    getsockopt(fd, SOL_SOCKET, SO_MEMINFO, memory, &length) == 0;
  return says ? static_cast<double>(unsent) + memory[SK_MEMINFO_WMEM_ALLOC] : on_the_way;
}

}  // namespace

void TcpLoad::ask(int fd, bool asks_here, int64_t now) {
  if (now - measured_ns > kMeasuredForNs) {
    measured_ns = now;
    measure(fd, *this);
  }
  int unconfirmed = 0;
  (void)!ioctl(fd, SIOCOUTQ, &unconfirmed);
  on_the_way = unconfirmed;
  queued_here = asks_here ? queue_of_host(fd, on_the_way) : 0;
}

namespace {

constexpr double kLeastBytes = 32 << 10;
constexpr double kLatePollsNs = 3 * 10e6;
constexpr double kEarlyPollNs = 0.5e6;    // where messages have priorities
constexpr double kOvertakenShare = 0.25;  // of what is kept for that long
// A refusal holds so long. With priorities a connection is asked about several times for each frame
// that leaves, each question is four system calls, and a rank that sleeps wakes up for it.
constexpr int64_t kRefusalNs = 30'000;
constexpr int64_t kRefusalWithPrioritiesNs = 150'000;
constexpr int64_t kForgotten = 32;  // of the lateness, one part at each poll

}  // namespace

bool TcpFlow::is_refused(int priority, int64_t now) const {
  return waits_ && priority <= refused_ && now < refused_until_ns_;
}

bool TcpFlow::has_room(const TcpLoad& load, int priority, Precedence precedence, int64_t now) {
  record_poll(now);
  const double excess = load.bytes_per_ns > 0 ? too_many(load, precedence) : 0;
  if (excess <= 0 || priority > priority_) {
    priority_ = priority;
    waits_ = false;
    return true;
  }
  refused_until_ns_ =
      now + (precedence == Precedence::none ? kRefusalNs : kRefusalWithPrioritiesNs);
  free_ns_ = refused_until_ns_ + static_cast<int64_t>(excess / load.bytes_per_ns);
  refused_ = priority;
  waits_ = true;
  return false;
}

// Bytes that have to leave, or to be confirmed, before there is room.
double TcpFlow::too_many(const TcpLoad& load, Precedence precedence) {
  const double travels = 2 * load.bytes_per_ns * load.round_trip_ns;
  if (precedence == Precedence::none) {
    return load.on_the_way - std::max(kLeastBytes, travels + load.bytes_per_ns * kLatePollsNs);
  }
  const double needed = std::max(kLeastBytes, load.bytes_per_ns * kEarlyPollNs);
  if (precedence == Precedence::overtaken) {
    return std::max(load.on_the_way - travels - needed,
                    load.queued_here - kOvertakenShare * needed);
  }
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

// A poll that comes before its time says nothing, and neither does one at which no frame waited.
void TcpFlow::record_poll(int64_t now) {
  if (waits_ && now >= free_ns_) {
    waits_ = false;
    late_ns_ = std::max(now - free_ns_, late_ns_ - late_ns_ / kForgotten);
  }
}

}  // namespace dpcore
