// The kernel measures the rate and the shortest round trip of each connection anyway.
#include "comm/network/tcp_flow.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>

namespace dpcore {
namespace {

constexpr double kLeastBytes = 32 << 10;
constexpr int64_t kMeasuredForNs = 1'000'000;
constexpr int64_t kShortestPauseNs = 30'000;

}  // namespace

bool TcpFlow::has_room(int fd, int priority, int64_t until_next_look_ns, int64_t now) {
  if (now - measured_ns_ > kMeasuredForNs) {
    measured_ns_ = now;
    measure(fd);
  }
  const double busy_ns = 2 * round_trip_ns_ + static_cast<double>(until_next_look_ns);
  const double enough = std::max(kLeastBytes, bytes_per_ns_ * busy_ns);
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
  return false;
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
