// Which ranks share a host: those that reach each other's abstract Unix socket, with the same user
// on both sides. Host names and boot ids say nothing about it: containers and network namespaces
// share them, and share no memory.
//
// Every rank shows itself at a name made of the job and its rank before it tells anybody that it
// came. Once all have come, each looks for the lowest rank that it reaches: ranks with the same
// answer are *local peers*, and they hand over their arenas as ranks of one host do (rendezvous.h).
//
// Used by one thread, while ranks meet. Owns one listening socket, to which nobody ever talks:
// that a connection comes about is the whole message.
#pragma once

#include <string>
#include <vector>

#include "comm/memory/unix_socket.h"
#include "comm/rendezvous/rendezvous.h"

namespace dpcore {

class HostMark {
 public:
  // Ranks with another `label` are on another host, as far as anybody can tell.
  HostMark(const Rendezvous& rendezvous, const std::string& label);
  // To be asked when all ranks have made theirs.
  int lowest_in_reach() const;

 private:
  std::string name_of(int rank) const;

  const Rendezvous& rendezvous_;
  std::string label_;
  UnixSocket listener_;
};

// `hosts[r]`: the lowest rank on the host of r. Throws when the ranks do not say the same: that
// `r` reaches somebody who reaches others than r does.
void check_hosts(const std::vector<int>& hosts);

// The rendezvous of the local peers among themselves: their ranks in the world, ascending.
Rendezvous local_rendezvous(const Rendezvous& rendezvous, const std::vector<int>& hosts);

}  // namespace dpcore
