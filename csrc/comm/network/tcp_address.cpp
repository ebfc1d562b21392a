// Names to addresses: what "host:port", an interface or a route mean on this host.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/base/error.h"
#include "comm/network/tcp_socket.h"

namespace dpcore {

TcpAddress::TcpAddress(const sockaddr* address, socklen_t length) : length_(length) {
  std::memcpy(&storage_, address, std::min<size_t>(length, sizeof(storage_)));
}

std::vector<TcpAddress> TcpAddress::resolve(const std::string& host_and_port) {
  const size_t colon = host_and_port.rfind(':');
  if (colon == std::string::npos || colon + 1 == host_and_port.size()) {
    throw RendezvousError("'" + host_and_port +
                          "' is not an address; write host:port or [host]:port");
  }
  std::string host = host_and_port.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = getaddrinfo(host.c_str(), host_and_port.c_str() + colon + 1, &hints, &found);
  if (problem != 0) {
    throw RendezvousError("cannot find the host of '" + host_and_port +
                          "': " + gai_strerror(problem));
  }
  std::vector<TcpAddress> addresses;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    addresses.emplace_back(at->ai_addr, at->ai_addrlen);
  }
  freeaddrinfo(found);
  return addresses;
}

TcpAddress TcpAddress::of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) {
    throw RendezvousError(std::string("cannot list network interfaces: ") + std::strerror(errno));
  }
  TcpAddress best;
  std::string known;
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    const int family = at->ifa_addr == nullptr ? AF_UNSPEC : at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) {
      continue;
    }
    known += (known.empty() ? "" : ", ") + std::string(at->ifa_name);
    const bool is_better = best.length_ == 0 || (best.family() == AF_INET6 && family == AF_INET);
    if (name == at->ifa_name && is_better) {
      best =
          TcpAddress(at->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  freeifaddrs(all);
  if (best.length_ == 0) {
    throw RendezvousError("there is no network interface '" + name +
                          "' with an address; there are " + known);
  }
  return best.with_port(0);
}

// A datagram socket that is "connected" sends nothing, but the kernel chooses the route.
TcpAddress TcpAddress::towards(const TcpAddress& target) {
  const int fd = socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  const bool found = fd >= 0 && connect(fd, target.get(), target.length()) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  const int problem = errno;
  if (fd >= 0) {
    close(fd);
  }
  if (!found) {
    throw RendezvousError("no route to " + target.text() + ": " + std::strerror(problem) +
                          "; is the interface up?");
  }
  return TcpAddress(reinterpret_cast<sockaddr*>(&address), length).with_port(0);
}

bool TcpAddress::is_loopback() const {
  if (family() == AF_INET) {
    const auto* address = reinterpret_cast<const sockaddr_in*>(&storage_);
    return (ntohl(address->sin_addr.s_addr) >> 24) == 127;
  }
  return family() == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_addr);
}

TcpAddress TcpAddress::with_port(uint16_t port) const {
  TcpAddress copy = *this;
  if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&copy.storage_)->sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6*>(&copy.storage_)->sin6_port = htons(port);
  }
  return copy;
}

std::string TcpAddress::text() const {
  char host[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  getnameinfo(get(), length_, host, sizeof(host), port, sizeof(port),
              NI_NUMERICHOST | NI_NUMERICSERV);
  return family() == AF_INET6 ? "[" + std::string(host) + "]:" + port
                              : std::string(host) + ":" + port;
}

}  // namespace dpcore
