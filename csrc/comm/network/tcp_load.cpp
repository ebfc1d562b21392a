// See tcp_load.h.
#include "comm/network/tcp_load.h"

#include <linux/sock_diag.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

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

}  // namespace dpcore
