// Phases: gather (all ranks at rank 0), hosts (which ranks share one), link (all pairs), and the
// word to go.
#include "comm/rendezvous/meet_tcp.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/host_mark.h"

namespace dpcore {
namespace {

// The TCP connections of one rank to the others while they meet: it connects to those below it, and
// those above connect to it. Both sides of a connection prove that they belong to the job
// (handshake.h).
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

constexpr int kLookMs = 20;
constexpr int64_t kRetryNs = 5'000'000;
// For one of several addresses of a host: behind a firewall it may never answer.
constexpr int64_t kTryNs = 2'000'000'000;

std::string who(const Rendezvous& rendezvous) { return rendezvous.name_of(rendezvous.rank) + ": "; }

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
      throw RendezvousError(who(rendezvous_) + "no connection came to " +
                            listener.local_address().text() + " from " + late +
                            " before the deadline. Check that it is still running, that no "
                            "firewall blocks this address, and that it can reach the interface "
                            "(DPCORE_SOCKET_IFNAME names another)");
    }
    if (auto client = server.next(kLookMs)) {
      present_[client->greeting.rank].lines[client->greeting.line] = std::move(client->socket);
      --missing;
    }
  }
}

// Rank 0 says at its own deadline which ranks are missing: the others give it time for that.
constexpr int64_t kGraceNs = 1'000'000'000;

// From rank 0 to the others at the end of a phase, and from them to rank 0 once they are linked.
struct Notice {
  uint32_t all_well = 0;
  char reason[508] = {};
};

struct Entry {  // one rank in the list that rank 0 hands out
  int32_t process = 0;
  char address[64] = {};
  CostConstants costs;  // of rank 0
};

Notice notice_of(const std::string& problem) {
  Notice notice;
  notice.all_well = problem.empty() ? 1 : 0;
  problem.copy(notice.reason, sizeof(notice.reason) - 1);
  return notice;
}

class TcpRendezvous {
 public:
  TcpRendezvous(const Rendezvous& rendezvous, const TcpOptions& net,
                const MeetLocalPeers& meet_local_peers)
      : rendezvous_(rendezvous),
        net_(net),
        meet_local_peers_(meet_local_peers),
        own_{rendezvous.name,  net.secret, rendezvous.rank,
             rendezvous.world, net.lines,  net.shares_memory},
        present_(rendezvous.world) {
    if (net.shares_memory) {
      mark_.emplace(rendezvous, net.host_label);
    }
  }

  std::vector<RendezvousPeer> run() {
    if (rendezvous_.rank == 0) {
      host();
      *net_.listener = TcpSocket();  // no further rank is expected
    } else {
      join();
    }
    for (RendezvousPeer& peer : present_) {
      for (TcpSocket& line : peer.lines) {
        line.prepare_for_frames();
      }
    }
    return std::move(present_);
  }

 private:
  std::string who() const { return rendezvous_.name_of(rendezvous_.rank) + ": "; }

  // What comes from below does not say whose problem it is.
  std::string with_rank(const std::string& problem) const {
    return (problem.starts_with("rank ") ? "" : who()) + problem;
  }

  // ---- rank 0 ----

  void host() {
    if (!net_.listener) {
      throw RendezvousError("rank 0: no listener was made for " + net_.root);
    }
    std::vector<TcpSocket> clients(rendezvous_.world);
    try {
      gather(clients);
      hand_out(clients);
      share_hosts(clients);
      std::vector<bool> heard(rendezvous_.world);
      lines_.look = [&] {
        lines_.look_up();
        hear_who_came(clients, heard);
      };
      link(*net_.listener);
      hear_from_all(clients, heard);
    } catch (const RendezvousError& problem) {
      const std::string text = with_rank(problem.what());
      tell_all(clients, text);
      throw RendezvousError(text);
    }
    tell_all(clients, "");
  }

  void gather(std::vector<TcpSocket>& clients) {
    HandshakeServer server(*net_.listener, own_, [&](const Greeting& greeting) -> std::string {
      if (greeting.purpose != static_cast<uint32_t>(Purpose::meet) || greeting.rank == 0) {
        return "rank 0 does not expect this yet";
      }
      if (clients[greeting.rank]) {
        return rendezvous_.name_of(greeting.rank) + " is there already (process " +
               std::to_string(present_[greeting.rank].process) +
               "); two processes claim the same rank";
      }
      return "";
    });
    int arrived = 1;
    while (arrived < rendezvous_.world) {
      lines_.look_up();
      if (now_ns() > rendezvous_.deadline_ns) {
        std::string missing;
        for (int r = 1; r < rendezvous_.world; ++r) {
          missing += clients[r] ? "" : (missing.empty() ? "" : ", ") + std::to_string(r);
        }
        throw RendezvousError(
            "rank 0: " + std::to_string(arrived) + " of " + std::to_string(rendezvous_.world) +
            " ranks came to " + net_.root + "; missing: " + missing +
            (server.last_refusal().empty() ? "" : "; refused: " + server.last_refusal()));
      }
      if (auto client = server.next(kLookMs)) {
        RendezvousPeer& peer = present_[client->greeting.rank];
        peer.process = client->greeting.process;
        peer.address = std::string(client->greeting.address,
                                   strnlen(client->greeting.address, sizeof(Greeting::address)));
        clients[client->greeting.rank] = std::move(client->socket);
        ++arrived;
      }
    }
    present_[0].process = getpid();
    present_[0].costs = rendezvous_.costs;
    present_[0].address = net_.listener->local_address().text();
  }

  void hand_out(std::vector<TcpSocket>& clients) {
    std::vector<Entry> list(rendezvous_.world);
    for (int r = 0; r < rendezvous_.world; ++r) {
      list[r].process = present_[r].process;
      list[r].costs = rendezvous_.costs;
      present_[r].address.copy(list[r].address, sizeof(Entry::address) - 1);
    }
    give_all(clients, list.data(), list.size() * sizeof(Entry));
  }

  // What every rank waits for at the end of a phase, after a notice that all is well.
  void give_all(std::vector<TcpSocket>& clients, const void* data, size_t bytes) {
    Notice complete;
    complete.all_well = 1;
    for (int r = 1; r < rendezvous_.world; ++r) {
      talk_with(r, [&] {
        return clients[r].send_all(&complete, sizeof(complete), rendezvous_.deadline_ns,
                                   rendezvous_.interrupted) &&
               clients[r].send_all(data, bytes, rendezvous_.deadline_ns, rendezvous_.interrupted);
      });
    }
  }

  // `talk` returns whether rank r is there.
  template <class Talk>
  void talk_with(int r, Talk talk) const {
    bool is_there = false;
    try {
      is_there = talk();
    } catch (const NoAnswerError&) {
      throw RendezvousError(rendezvous_.name_of(r) +
                            " did not answer before the deadline; is it stopped?");
    }
    if (!is_there) {
      throw RendezvousError(rendezvous_.name_of(r) + " went away while the ranks were meeting");
    }
  }

  // Hears from all whom they reach, and tells all.
  void share_hosts(std::vector<TcpSocket>& clients) {
    std::vector<int32_t> hosts(rendezvous_.world);
    hosts[0] = 0;
    for (int r = 1; r < rendezvous_.world; ++r) {
      talk_with(r, [&] {
        return clients[r].receive_all(&hosts[r], sizeof(hosts[r]), rendezvous_.deadline_ns,
                                      rendezvous_.interrupted);
      });
    }
    give_all(clients, hosts.data(), hosts.size() * sizeof(hosts[0]));
    learn_hosts(hosts);
  }

  void hear_from_all(std::vector<TcpSocket>& clients, std::vector<bool>& heard) {
    for (int r = 1; r < rendezvous_.world; ++r) {
      if (!heard[r]) {
        heard[r] = true;
        hear(r, clients[r], lines_.look);
      }
    }
  }

  // Those that have said already how linking went: a rank that failed is heard at once, and not
  // when the ranks that wait for it have waited in vain.
  void hear_who_came(std::vector<TcpSocket>& clients, std::vector<bool>& heard) {
    for (int r = 1; r < rendezvous_.world; ++r) {
      if (!heard[r] && clients[r].has_something()) {
        heard[r] = true;
        hear(r, clients[r], rendezvous_.interrupted);
      }
    }
  }

  void hear(int r, TcpSocket& client, const TcpSocket::Interrupt& interrupted) {
    Notice notice;
    talk_with(r, [&] {
      return client.receive_all(&notice, sizeof(notice), rendezvous_.deadline_ns + kGraceNs,
                                interrupted);
    });
    if (notice.all_well != 1) {
      notice.reason[sizeof(notice.reason) - 1] = '\0';
      throw RendezvousError(notice.reason);
    }
  }

  void tell_all(std::vector<TcpSocket>& clients, const std::string& problem) {
    const Notice notice = notice_of(problem);
    for (TcpSocket& client : clients) {
      try {
        if (client) {
          client.send_all(&notice, sizeof(notice), now_ns() + kGraceNs, nullptr);
        }
      } catch (const NoAnswerError&) {  // it does not read: the others must still hear
      }
    }
  }

  // ---- the others ----

  void join() {
    TcpSocket root;
    std::shared_ptr<TcpSocket> listener;
    while (!root) {
      TcpSocket line = lines_.reach(net_.root, "rank 0");
      const TcpAddress here = net_.interface.empty() ? line.local_address().with_port(0)
                                                     : TcpAddress::of_interface(net_.interface);
      listener = std::make_shared<TcpSocket>(TcpSocket::listen_at(here));
      const Greeting greeting =
          greeting_of(own_, Purpose::meet, 0, listener->local_address().text());
      if (introduce(line, greeting, own_, "rank 0", rendezvous_.deadline_ns + kGraceNs,
                    rendezvous_.interrupted)) {
        root = std::move(line);
      } else {
        lines_.try_again("what listens as rank 0 at " + net_.root +
                         " hangs up; is rank 0 running, or is the port another program's?");
      }
    }
    std::vector<Entry> list(rendezvous_.world);
    take_given(root, list.data(), list.size() * sizeof(Entry));
    for (int r = 0; r < rendezvous_.world; ++r) {
      present_[r].process = list[r].process;
      present_[r].costs = list[r].costs;
      present_[r].address =
          std::string(list[r].address, strnlen(list[r].address, sizeof(Entry::address)));
    }
    find_own_host(root);
    // Before this rank is linked, rank 0 only says that a rank failed.
    lines_.look = [&] {
      lines_.look_up();
      if (root.has_something()) {
        await_notice(root);
      }
    };
    try {
      link(*listener);
    } catch (const RendezvousError& problem) {
      const std::string text = with_rank(problem.what());
      report(root, text);
      throw RendezvousError(text);
    }
    report(root, "");
    await_notice(root);
  }

  void report(TcpSocket& root, const std::string& problem) {
    const Notice notice = notice_of(problem);
    try {
      root.send_all(&notice, sizeof(notice), rendezvous_.deadline_ns + kGraceNs,
                    rendezvous_.interrupted);
    } catch (const NoAnswerError&) {  // await_notice will say so
    }
  }

  void find_own_host(TcpSocket& root) {
    const int32_t host = mark_ ? mark_->lowest_in_reach() : rendezvous_.rank;
    std::vector<int32_t> hosts(rendezvous_.world);
    root.send_all(&host, sizeof(host), rendezvous_.deadline_ns + kGraceNs, rendezvous_.interrupted);
    take_given(root, hosts.data(), hosts.size() * sizeof(hosts[0]));
    learn_hosts(hosts);
  }

  void take_given(TcpSocket& root, void* data, size_t bytes) {
    await_notice(root);
    if (!root.receive_all(data, bytes, rendezvous_.deadline_ns + kGraceNs,
                          rendezvous_.interrupted)) {
      throw RendezvousError(who() + "rank 0 went away while the ranks were meeting");
    }
  }

  void await_notice(TcpSocket& root) {
    Notice notice;
    bool came = false;
    try {
      came = root.receive_all(&notice, sizeof(notice), rendezvous_.deadline_ns + 2 * kGraceNs,
                              rendezvous_.interrupted);
    } catch (const NoAnswerError&) {
      throw RendezvousError(who() + "rank 0 did not answer before the deadline; is it stopped?");
    }
    if (!came) {
      throw RendezvousError(who() + "rank 0 went away while the ranks were meeting");
    }
    if (notice.all_well != 1) {
      notice.reason[sizeof(notice.reason) - 1] = '\0';
      throw RendezvousError(who() + "told by rank 0: " + notice.reason);
    }
  }

  // ---- all ----

  void learn_hosts(const std::vector<int32_t>& hosts) {
    hosts_ = hosts;
    for (int r = 0; r < rendezvous_.world; ++r) {
      present_[r].host = hosts_[r];
      present_[r].lines.resize(hosts_[r] == hosts_[rendezvous_.rank] ? 0 : net_.lines);
    }
  }

  // Memory first: local peers need no other rank for it, so ranks do not wait in a circle.
  void link(TcpSocket& listener) {
    check_hosts(hosts_);
    Rendezvous local = local_rendezvous(rendezvous_, hosts_);
    local.interrupted = lines_.look;
    if (local.world > 1) {
      std::vector<LocalPeer> memory = meet_local_peers_(local);
      for (int i = 0; i < local.world; ++i) {
        present_[local.members[i]].memory = std::move(memory[i]);
      }
    }
    for (int r = 0; r < rendezvous_.rank; ++r) {
      if (present_[r].is_remote()) {
        lines_.connect_lines(r);
      }
    }
    lines_.accept_lines(listener);
  }

  const Rendezvous& rendezvous_;
  const TcpOptions& net_;
  const MeetLocalPeers& meet_local_peers_;
  Credentials own_;
  std::optional<HostMark> mark_;  // until the end: local peers look for it at different times
  std::vector<int> hosts_;
  std::vector<RendezvousPeer> present_;
  RendezvousLines lines_{rendezvous_, net_, own_, present_};
};

}  // namespace

std::vector<RendezvousPeer> meet_tcp(const Rendezvous& rendezvous, const TcpOptions& net,
                                     const MeetLocalPeers& meet_local_peers) {
  if (net.lines < kMinLines || net.lines > kMaxLines) {
    throw RendezvousError("DPCORE_TCP_SOCKETS: " + std::to_string(net.lines - 1) +
                          " sockets for data; choose 1.." + std::to_string(kMaxLines - 1));
  }
  return TcpRendezvous(rendezvous, net, meet_local_peers).run();
}

}  // namespace dpcore
