// Which ranks share a host: those that reach each other's abstract Unix socket, with the same user
// on both sides. Host names and boot ids say nothing about it: containers and network namespaces
// share them, and share no memory.
//
// Every rank shows itself at a name made of the job and its rank before it tells another rank that
// it came. Once all have come, each looks for the lowest rank that it reaches: ranks with the same
// answer are *local peers*, and they hand over their arenas as ranks of one host do (rendezvous.h).
//
// Used by one thread, while ranks meet. Owns one listening socket, on which no data is ever sent:
// that a connection comes about is the whole message. A rank that finds its own name taken (by
// another user, since names bear the job) cannot be found: it is alone on its host then, which is
// slower and just as right.
#pragma once

#include <string>
#include <vector>

#include "comm/base/error.h"
#include "comm/memory/unix_socket.h"
#include "comm/rendezvous/rendezvous.h"

namespace dpcore {

class HostMark {
 public:
  // Ranks with another `label` are on another host, as far as dpcore can tell.
  HostMark(const Rendezvous& rendezvous, const std::string& label)
      : rendezvous_(rendezvous),
        label_(label),
        listener_(UnixSocket::listen_at(name_of(rendezvous.rank))) {}
  // To be asked when all ranks have made theirs.
  int lowest_in_reach() const {
    for (int r = 0; r < rendezvous_.rank && listener_; ++r) {
      const UnixSocket line = UnixSocket::connect_to(name_of(r));
      if (line && line.same_user()) {
        return r;
      }
    }
    return rendezvous_.rank;
  }

 private:
  std::string name_of(int rank) const {
    return rendezvous_.name + "/" + label_ + "/" + std::to_string(rank);
  }

  const Rendezvous& rendezvous_;
  std::string label_;
  UnixSocket listener_;
};

// `hosts[r]`: the lowest rank on the host of r. Throws when the ranks do not say the same: that
// `r` reaches a rank that reaches others than r does.
inline void check_hosts(const std::vector<int>& hosts) {
  for (size_t r = 0; r < hosts.size(); ++r) {
    const int lowest = hosts[r];
    const bool exists = lowest >= 0 && lowest <= static_cast<int>(r);
    if (!exists || hosts[static_cast<size_t>(lowest)] != lowest) {
      throw RendezvousError(
          "the ranks disagree about which of them share a host: rank " + std::to_string(r) +
          " reaches rank " + std::to_string(lowest) + " as the lowest rank of its host, but rank " +
          std::to_string(lowest) +
          (exists ? " itself reaches rank " + std::to_string(hosts[static_cast<size_t>(lowest)])
                  : " comes after it") +
          ". Containers that share only a part of their namespaces do this: pass transport='tcp' "
          "to "
          "dpcore.init() on all ranks");
    }
  }
}

// The rendezvous of the local peers among themselves: their ranks in the world, ascending.
inline Rendezvous local_rendezvous(const Rendezvous& rendezvous, const std::vector<int>& hosts) {
  const int lowest = hosts[static_cast<size_t>(rendezvous.rank)];
  Rendezvous local = rendezvous;
  local.name = rendezvous.name + "/local/" + std::to_string(lowest);
  local.world = 0;
  for (int r = 0; r < rendezvous.world; ++r) {
    if (hosts[static_cast<size_t>(r)] == lowest) {
      local.rank = r == rendezvous.rank ? local.world : local.rank;
      local.members.push_back(r);
      ++local.world;
    }
  }
  return local;
}

}  // namespace dpcore
