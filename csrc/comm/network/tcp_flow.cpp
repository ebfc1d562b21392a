// The kernel measures the rate and the shortest round trip of each connection anyway.
#include "comm/network/tcp_flow.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>

#include "comm/network/tcp_socket.h"

namespace dpcore {
namespace {

constexpr double kLeastBytes = 32 << 10;
constexpr int64_t kMeasuredForNs = 1'000'000;
constexpr int64_t kShortestPauseNs = 30'000;
constexpr int64_t kForgotten = 32;  // of the lateness, one part at each look

}  // namespace

bool TcpFlow::has_room(int fd, int priority, int64_t until_next_look_ns, int64_t now) {
  note_look(now);
  if (now - measured_ns_ > kMeasuredForNs) {
    measured_ns_ = now;
    measure(fd);
  }
  const double look_ns = static_cast<double>(until_next_look_ns);
  const double late_ns = static_cast<double>(std::max(until_next_look_ns, late_ns_));
  const double needed = bytes_per_ns_ * (2 * round_trip_ns_ + look_ns);
  const double wanted = bytes_per_ns_ * (2 * round_trip_ns_ + late_ns);
  const double enough = std::max({kLeastBytes, needed, std::min(wanted, most_unsent_)});
  if (until_next_look_ns == kEarlyLookNs && std::abs(enough - enough_) > kLeastBytes) {
    enough_ = enough;
    const double unsent = std::clamp(enough, least_unsent_, most_unsent_);
    TcpSocket::limit_unsent(fd, static_cast<size_t>(unsent));
  }
  int on_the_way = 0;
  if (bytes_per_ns_ == 0 || ioctl(fd, SIOCOUTQ, &on_the_way) != 0 || on_the_way <= enough) {
    priority_ = priority;
    return true;
  }
  if (priority > priority_) {
    return true;
  }
  const auto too_many_ns = static_cast<int64_t>((on_the_way - enough) / bytes_per_ns_);
  free_ns_ = now + std::max(kShortestPauseNs, too_many_ns);
  waits_ = true;
  return false;
}

void TcpFlow::share(int fd, size_t unsent, size_t late) {
  least_unsent_ = static_cast<double>(unsent);
  most_unsent_ = static_cast<double>(std::max(unsent, late));
  TcpSocket::limit_unsent(fd, unsent);
}

// A look that comes before its time says nothing.
void TcpFlow::note_look(int64_t now) {
  if (waits_ && now >= free_ns_) {
    waits_ = false;
    late_ns_ = std::max(now - free_ns_, late_ns_ - late_ns_ / kForgotten);
  }
}

void TcpFlow::measure(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_delivery_rate == 0) {
    return;
  }
  bytes_per_ns_ = static_cast<double>(info.tcpi_delivery_rate) * 1e-9;
  round_trip_ns_ = 1e3 * info.tcpi_min_rtt;
}

}  // namespace dpcore
