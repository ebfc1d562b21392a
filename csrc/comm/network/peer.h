// A peer that is reached over TCP, as the rendezvous hands it to the network: who it is, and the
// connections to it. Whoever holds the value owns the sockets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/network/tcp_socket.h"

namespace dpcore {

struct TcpPeer {
  std::string address;
  std::vector<TcpSocket> lines;  // empty for this rank and its local peers
  bool is_remote() const { return !lines.empty(); }
};

}  // namespace dpcore
