// The TCP connections of one rank to the others while they meet: it connects to those below it, and
// those above connect to it. Used by one thread.
#pragma once

#include <string>
#include <vector>

#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/meet_tcp.h"

namespace dpcore {

class RendezvousLines {
 public:
  // All of them outlive it; connections go into `present`.
  RendezvousLines(const Rendezvous& rendezvous, const TcpOptions& net, const Credentials& own,
                  std::vector<RendezvousPeer>& present)
      : rendezvous_(rendezvous), net_(net), own_(own), present_(present) {}

  // Called every 20 ms in what waits for other ranks; what it throws ends the wait.
  TcpSocket::Interrupt look = [this] { look_up(); };
  void look_up() const;

  // Tries all addresses of a rank until one answers or the deadline is over.
  TcpSocket reach(const std::string& address, const std::string& whose) const;
  // Returns a moment later; past the deadline it throws the problem.
  void try_again(const std::string& problem) const;
  void connect_lines(int r);
  void accept_lines(TcpSocket& listener);

 private:
  const Rendezvous& rendezvous_;
  const TcpOptions& net_;
  const Credentials& own_;
  std::vector<RendezvousPeer>& present_;
};

}  // namespace dpcore
