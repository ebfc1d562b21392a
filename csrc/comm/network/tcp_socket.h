// TCP sockets and addresses, IPv4 and IPv6, for the rendezvous and the connections it makes.
//
// A socket owns its descriptor (and tells fork_guard, so that a forked child does not keep a
// connection open). All sockets are non-blocking; send_all and receive_all wait with a deadline
// and are for the few hundred bytes of a rendezvous. No thread of its own, no buffer.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/fork_guard.h"

namespace dpcore {

class TcpAddress {
 public:
  TcpAddress() = default;
  TcpAddress(const sockaddr* address, socklen_t length);
  // All addresses of "host:port" or "[host]:port". Throws RendezvousError.
  static std::vector<TcpAddress> resolve(const std::string& host_and_port);
  // Of a network interface ("eth0"); port 0. Throws RendezvousError naming those there are.
  static TcpAddress of_interface(const std::string& name);
  // Of this host, as packets to `target` would bear it; port 0.
  static TcpAddress towards(const TcpAddress& target);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  int family() const { return storage_.ss_family; }
  bool is_loopback() const;
  TcpAddress with_port(uint16_t port) const;
  std::string text() const;  // "10.0.0.1:29500", "[fe80::1%eth0]:29500"

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

class TcpSocket {
 public:
  using Interrupt = std::function<void()>;

  TcpSocket() = default;
  explicit TcpSocket(int fd) : fd_(fd) {}

  // Throws RendezvousError with the address and the reason.
  static TcpSocket listen_at(const TcpAddress& address);
  // An empty socket when no process listens there (yet) or the way is blocked; `problem` says why.
  static TcpSocket connect_to(const TcpAddress& address, int64_t deadline_ns,
                              const Interrupt& interrupted, std::string* problem);
  // The next connection, or an empty socket when there is none now. Throws RendezvousError where no
  // descriptor is left for it.
  TcpSocket accept();

  explicit operator bool() const { return static_cast<bool>(fd_); }
  int fd() const { return fd_.get(); }
  TcpAddress local_address() const;
  TcpAddress peer_address() const;

  // For a connection that will carry frames: while nothing is sent, the kernel asks now and then
  // whether the other one still knows of the connection.
  void prepare_for_frames();
  // The kernel takes no more data while so many bytes of it have not left.
  static void limit_unsent(int fd, size_t bytes);
  // How long a connection may be without an answer before the kernel gives it up. The kernel counts
  // in milliseconds, and 12 days at most here.
  static void set_timeout(int fd, int64_t nanoseconds);

  // False when the other side is gone; throws NoAnswerError at the deadline.
  bool send_all(const void* data, size_t bytes, int64_t deadline_ns, const Interrupt& interrupted);
  bool receive_all(void* data, size_t bytes, int64_t deadline_ns, const Interrupt& interrupted);
  // Whether data has come, or the other side is gone.
  bool has_something() const;
  // Up to `bytes`; 0 when nothing is there now, -1 when the other side is gone.
  ptrdiff_t receive_some(void* data, size_t bytes);

 private:
  Descriptor fd_;
};

// Which user the other end of a connection belongs to. The kernel tells it of every socket of this
// network namespace (sock_diag), so of the other end where that is one, as on loopback. Nothing
// where the kernel does not say, or the other end is elsewhere, or has not accepted the connection.
std::optional<uid_t> user_of_peer(const TcpSocket& connection);

// A peer that is reached over TCP, as the rendezvous hands it to the network, which then owns the
// connections.
struct TcpPeer {
  std::string address;
  std::vector<TcpSocket> lines;  // empty for this rank and its local peers
  bool is_remote() const { return !lines.empty(); }
};

}  // namespace dpcore
