// Waits are slices of poll(), so that Ctrl-C and deadlines are noticed.
#include "comm/network/tcp_socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/base/clock.h"
#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr int kPollSliceMs = 20;
constexpr int kBacklog = 1024;
// While nothing is on its way. A host that was started anew says at once that it knows nothing of
// the connection; one that answers nothing is given up after what set_timeout() says.
constexpr int kQuietSeconds = 5;
constexpr int kProbeSeconds = 2;
constexpr int64_t kMostTimeoutMs = int64_t{1} << 30;
// After a break the kernel tries again at intervals that double, up to two minutes: a link that is
// back would be found late. Linux 6.15 and later have this bound; others do not know the option.
constexpr int kRetryAtMostMs = 1000;
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

bool is_ready(int fd, short events, int64_t deadline_ns, const TcpSocket::Interrupt& interrupted) {
  pollfd entry{fd, events, 0};
  while (poll(&entry, 1, kPollSliceMs) <= 0) {
    if (interrupted) {
      interrupted();
    }
    if (now_ns() > deadline_ns) {
      return false;
    }
  }
  return true;
}

[[noreturn]] void give_up() {
  throw NoAnswerError("no answer from the other side before the deadline");
}

void set_option(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof(value));
}

int new_socket(int family) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
  if (fd < 0) {
    throw RendezvousError(std::string("cannot make a TCP socket: ") + std::strerror(errno) +
                          (errno == EMFILE ? "; raise `ulimit -n`" : ""));
  }
  // From the first word on, since a rendezvous sends several in a row: each would wait for the
  // acknowledgement of the one before, 40 ms. What a listener accepts takes it over.
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  return fd;
}

}  // namespace

TcpSocket TcpSocket::listen_at(const TcpAddress& address) {
  TcpSocket socket(new_socket(address.family()));
  set_option(socket.fd_.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6) {
    set_option(socket.fd_.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  }
  if (bind(socket.fd_.get(), address.get(), address.length()) != 0 ||
      listen(socket.fd_.get(), kBacklog) != 0) {
    const int problem = errno;
    std::string advice;
    if (problem == EADDRINUSE) {
      advice = "; another program has the port: choose another MASTER_PORT or init_method";
    } else if (problem == EADDRNOTAVAIL) {
      advice = "; it is not an address of this host: rank 0 must run where the address leads";
    }
    throw RendezvousError("cannot listen at " + address.text() + ": " + std::strerror(problem) +
                          advice);
  }
  return socket;
}

TcpSocket TcpSocket::connect_to(const TcpAddress& address, int64_t deadline_ns,
                                const Interrupt& interrupted, std::string* problem) {
  TcpSocket socket(new_socket(address.family()));
  int error = connect(socket.fd_.get(), address.get(), address.length()) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    if (!is_ready(socket.fd_.get(), POLLOUT, deadline_ns, interrupted)) {
      *problem = "nothing answers";
      return {};
    }
    socklen_t length = sizeof(error);
    getsockopt(socket.fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error != 0) {
    *problem = std::strerror(error);
    return {};
  }
  // A port of the ephemeral range may meet itself: both ends of the connection are then ours.
  if (socket.local_address().text() == socket.peer_address().text()) {
    *problem = "no process listens";
    return {};
  }
  return socket;
}

TcpSocket TcpSocket::accept() {
  const int fd = accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
    throw RendezvousError(std::string("cannot accept the other ranks: ") + std::strerror(errno) +
                          "; raise `ulimit -n`");
  }
  return TcpSocket(fd);
}

TcpAddress TcpSocket::local_address() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return {reinterpret_cast<sockaddr*>(&address), length};
}

TcpAddress TcpSocket::peer_address() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  getpeername(fd_.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return {reinterpret_cast<sockaddr*>(&address), length};
}

void TcpSocket::prepare_for_frames() {
  set_option(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPIDLE, kQuietSeconds);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set_option(fd_.get(), IPPROTO_TCP, TCP_RTO_MAX_MS, kRetryAtMostMs);
}

void TcpSocket::set_timeout(int fd, int64_t nanoseconds) {
  const int64_t wanted = nanoseconds / 1'000'000;
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min(wanted, kMostTimeoutMs)));
}

void TcpSocket::limit_unsent(int fd, size_t bytes) {
  set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(bytes));
}

bool TcpSocket::send_all(const void* data, size_t bytes, int64_t deadline_ns,
                         const Interrupt& interrupted) {
  const auto* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd_.get(), from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      from += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!is_ready(fd_.get(), POLLOUT, deadline_ns, interrupted)) {
        give_up();
      }
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool TcpSocket::has_something() const {
  pollfd entry{fd_.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

ptrdiff_t TcpSocket::receive_some(void* data, size_t bytes) {
  while (true) {
    const ssize_t received = ::recv(fd_.get(), data, bytes, MSG_DONTWAIT);
    if (received > 0) {
      return received;
    }
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return 0;
    }
    if (received == 0 || errno != EINTR) {
      return -1;
    }
  }
}

bool TcpSocket::receive_all(void* data, size_t bytes, int64_t deadline_ns,
                            const Interrupt& interrupted) {
  auto* to = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ptrdiff_t received = receive_some(to, bytes);
    if (received < 0) {
      return false;
    }
    if (received == 0 && !is_ready(fd_.get(), POLLIN, deadline_ns, interrupted)) {
      give_up();
    }
    to += received;
    bytes -= static_cast<size_t>(received);
  }
  return true;
}

// ---- addresses: what "host:port", an interface or a route mean on this host

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

namespace {

// One question to the kernel by a netlink socket, and its answer.
struct Question {
  nlmsghdr header;
  inet_diag_req_v2 request;
};

struct Answer {  // attributes follow, which are of no interest
  nlmsghdr header;
  inet_diag_msg socket;
};

void put_address(const TcpAddress& address, __be16& port, __be32 (&host)[4]) {
  if (address.family() == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(address.get());
    port = in->sin_port;
    std::memcpy(host, &in->sin_addr, sizeof(in->sin_addr));
  } else {
    const auto* in = reinterpret_cast<const sockaddr_in6*>(address.get());
    port = in->sin6_port;
    std::memcpy(host, &in->sin6_addr, sizeof(in->sin6_addr));
  }
}

}  // namespace

std::optional<uid_t> user_of_peer(const TcpSocket& connection) {
  const TcpAddress there = connection.peer_address();
  const TcpAddress here = connection.local_address();
  Question question{};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.request.sdiag_family = static_cast<uint8_t>(there.family());
  question.request.sdiag_protocol = IPPROTO_TCP;
  inet_diag_sockid& id = question.request.id;
  put_address(there, id.idiag_sport, id.idiag_src);
  put_address(here, id.idiag_dport, id.idiag_dst);
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

  const Descriptor line(socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  std::byte received[1024];
  if (!line || ::send(line.get(), &question, sizeof(question), 0) != sizeof(question) ||
      ::recv(line.get(), received, sizeof(received), MSG_DONTWAIT) <
          static_cast<ssize_t>(sizeof(Answer))) {
    return std::nullopt;
  }
  Answer answer;
  std::memcpy(&answer, received, sizeof(answer));
  // Where there is no such connection the kernel tells of whatever listens there. A socket without
  // an inode is no process's (any more), and what the kernel says of its user means nothing.
  const inet_diag_sockid& found = answer.socket.id;
  const bool is_peer = answer.header.nlmsg_type == SOCK_DIAG_BY_FAMILY &&
                       found.idiag_sport == id.idiag_sport && found.idiag_dport == id.idiag_dport &&
                       answer.socket.idiag_inode != 0;
  return is_peer ? std::optional<uid_t>(answer.socket.idiag_uid) : std::nullopt;
}

}  // namespace dpcore
