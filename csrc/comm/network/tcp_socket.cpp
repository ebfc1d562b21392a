// Waits are slices of poll(), so that Ctrl-C and deadlines are noticed.
#include "comm/network/tcp_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
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
// the connection; one that answers nothing is given up after what bear_silence() says.
constexpr int kQuietSeconds = 5;
constexpr int kProbeSeconds = 2;
constexpr int64_t kMostSilenceMs = int64_t{1} << 30;
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
    *problem = "nobody listens";
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

void TcpSocket::bear_silence(int fd, int64_t nanoseconds) {
  const int64_t wanted = nanoseconds / 1'000'000;
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min(wanted, kMostSilenceMs)));
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

}  // namespace dpcore
