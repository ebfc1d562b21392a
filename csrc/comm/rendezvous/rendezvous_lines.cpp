// Both sides of a connection prove who they are (handshake.h).
#include "comm/rendezvous/rendezvous_lines.h"

#include <unistd.h>

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr int kLookMs = 20;
constexpr int64_t kRetryNs = 5'000'000;
// For one of several addresses of a host: behind a firewall it may never answer.
constexpr int64_t kTryNs = 2'000'000'000;

std::string who(const Rendezvous& rendezvous) { return rendezvous.name_of(rendezvous.rank) + ": "; }

}  // namespace

void RendezvousLines::look_up() const {
  if (rendezvous_.interrupted) {
    rendezvous_.interrupted();
  }
}

TcpSocket RendezvousLines::reach(const std::string& address, const std::string& whose) const {
  std::string problem;
  const std::vector<TcpAddress> targets = TcpAddress::resolve(address);
  while (true) {
    for (const TcpAddress& target : targets) {
      const int64_t until = targets.size() == 1
                                ? rendezvous_.deadline_ns
                                : std::min(rendezvous_.deadline_ns, now_ns() + kTryNs);
      if (TcpSocket line = TcpSocket::connect_to(target, until, look, &problem)) {
        return line;
      }
    }
    try_again("cannot reach " + whose + " at " + address + ": " + problem +
              "; is it running, with the same MASTER_ADDR and MASTER_PORT, and does no firewall "
              "stand between?");
  }
}

void RendezvousLines::try_again(const std::string& problem) const {
  look();
  if (now_ns() > rendezvous_.deadline_ns) {
    throw RendezvousError(who(rendezvous_) + problem);
  }
  usleep(kRetryNs / 1000);
}

void RendezvousLines::connect_lines(int r) {
  for (int i = 0; i < net_.lines; ++i) {
    TcpSocket line = reach(present_[r].address, rendezvous_.name_of(r));
    if (!introduce(line, greeting_of(own_, Purpose::line, i, ""), own_, rendezvous_.name_of(r),
                   rendezvous_.deadline_ns, look)) {
      throw RendezvousError(who(rendezvous_) + rendezvous_.name_of(r) +
                            " went away while the ranks were connecting");
    }
    present_[r].lines[i] = std::move(line);
  }
}

void RendezvousLines::accept_lines(TcpSocket& listener) {
  int missing = 0;
  for (int r = rendezvous_.rank + 1; r < rendezvous_.world; ++r) {
    missing += static_cast<int>(present_[r].lines.size());
  }
  HandshakeServer server(listener, own_, [&](const Greeting& greeting) -> std::string {
    const bool belongs = greeting.purpose == static_cast<uint32_t>(Purpose::line) &&
                         greeting.rank > rendezvous_.rank && present_[greeting.rank].is_remote() &&
                         !present_[greeting.rank].lines[greeting.line];
    return belongs ? ""
                   : rendezvous_.name_of(greeting.rank) +
                         " is there already; two processes claim the same rank";
  });
  while (missing > 0) {
    look();
    if (now_ns() > rendezvous_.deadline_ns) {
      std::string late;
      for (int r = rendezvous_.rank + 1; r < rendezvous_.world; ++r) {
        const bool complete = !present_[r].is_remote() || present_[r].lines.back();
        late += complete ? "" : (late.empty() ? "" : ", ") + rendezvous_.name_of(r);
      }
      throw RendezvousError(who(rendezvous_) + "waited in vain at " +
                            listener.local_address().text() + " for " + late +
                            "; did it end, does a firewall stand between, or is it the wrong "
                            "interface (DPCORE_SOCKET_IFNAME)?");
    }
    if (auto client = server.next(kLookMs)) {
      present_[client->greeting.rank].lines[client->greeting.line] = std::move(client->socket);
      --missing;
    }
  }
}

}  // namespace dpcore
