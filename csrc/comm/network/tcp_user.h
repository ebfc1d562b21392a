// Which user the other end of a TCP connection belongs to. The kernel tells it of every socket of
// this network namespace (sock_diag), so of the other end where that is one, as on loopback.
#pragma once

#include <sys/types.h>

#include <optional>

#include "comm/network/tcp_socket.h"

namespace dpcore {

// Nothing where the kernel does not say, or the other end is elsewhere, or has not accepted the
// connection yet.
std::optional<uid_t> user_of_peer(const TcpSocket& connection);

}  // namespace dpcore
