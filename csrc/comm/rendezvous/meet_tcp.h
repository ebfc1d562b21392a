// How ranks of several hosts find each other: memory for those that share a host, connections for
// every other pair.
//
// Rank 0 listens at an address that all know (or have read from a store); the others come to it,
// say where they listen themselves, and get the list of all. Then every rank finds out which ranks
// share its host (host_mark.h), tells rank 0, and hears the same of all others; local peers hand
// over their arenas. Of each other pair the higher rank connects to the lower one, `lines` times.
// Every connection begins with a handshake (handshake.h). At the end rank 0 hears from every rank
// that it is connected and lets all go: init() returns on every rank or raises on every rank, with
// the same reason.
//
// The listeners are closed before meet_tcp returns. The caller owns the sockets.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/network/tcp_socket.h"
#include "comm/rendezvous/rendezvous.h"

namespace dpcore {

// One connection for control frames and at least one for data.
inline constexpr int kMinLines = 2;
inline constexpr int kMaxLines = 17;

struct TcpOptions {
  std::string root;                     // "host:port" of rank 0
  std::shared_ptr<TcpSocket> listener;  // rank 0's, which listens there already
  std::string interface;                // where the others listen; empty: on the route to rank 0
  std::string secret;
  int lines = 3;
  bool shares_memory = false;   // with ranks of the same host; otherwise all talk over TCP
  std::string host_label = {};  // ranks with another one count as being on another host
};

struct RendezvousPeer : TcpPeer {
  int32_t process = 0;
  CostConstants costs;  // known of rank 0 only
  int host = 0;         // the lowest rank that shares its memory
  LocalPeer memory;     // of a local peer
};

// How the ranks of one host hand over their arenas.
using MeetLocalPeers = std::function<std::vector<LocalPeer>(const Rendezvous& local)>;

std::vector<RendezvousPeer> meet_tcp(const Rendezvous& rendezvous, const TcpOptions& net,
                                     const MeetLocalPeers& meet_local_peers);

}  // namespace dpcore
