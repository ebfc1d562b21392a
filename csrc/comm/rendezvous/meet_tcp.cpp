// Phases: gather (all ranks at rank 0), hosts (who shares one), link (all pairs), and the word to
// go.
#include "comm/rendezvous/meet_tcp.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/host_mark.h"

namespace dpcore {
namespace {

constexpr int kLookMs = 20;
constexpr int64_t kRetryNs = 5'000'000;
// Rank 0 says at its own deadline who is missing: the others give it time for that.
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

std::string name_of_rank(int r) { return "rank " + std::to_string(r); }

class TcpMeeting {
 public:
  TcpMeeting(const MeetingPlace& place, const TcpPlace& net, const MeetMates& meet_mates)
      : place_(place),
        net_(net),
        meet_mates_(meet_mates),
        own_{place.name, net.secret, place.rank, place.world, net.lines, net.shares_memory},
        present_(place.world) {
    if (net.shares_memory) {
      mark_.emplace(place, net.host_label);
    }
  }
  ~TcpMeeting() {
    for (TcpPresence& peer : present_) {
      close_all(peer.memory);
    }
  }
  TcpMeeting(const TcpMeeting&) = delete;
  TcpMeeting& operator=(const TcpMeeting&) = delete;

  std::vector<TcpPresence> run() {
    if (place_.rank == 0) {
      host();
      *net_.listener = TcpSocket();  // nobody else is expected
    } else {
      join();
    }
    for (TcpPresence& peer : present_) {
      for (TcpSocket& line : peer.lines) {
        line.prepare_for_frames();
      }
    }
    return std::move(present_);
  }

 private:
  std::string who() const { return name_of_rank(place_.rank) + ": "; }

  void look_up() const {
    if (place_.interrupted) {
      place_.interrupted();
    }
  }

  // ---- rank 0 ----

  void host() {
    if (!net_.listener) {
      throw RendezvousError("rank 0: no listener was made for " + net_.root);
    }
    std::vector<TcpSocket> guests(place_.world);
    try {
      gather(guests);
      hand_out(guests);
      share_hosts(guests);
      link(*net_.listener);
      hear_from_all(guests);
    } catch (const RendezvousError& problem) {
      tell_all(guests, problem.what());
      throw;
    }
    tell_all(guests, "");
  }

  void gather(std::vector<TcpSocket>& guests) {
    Lobby lobby(*net_.listener, own_, [&](const Greeting& greeting) -> std::string {
      if (greeting.purpose != static_cast<uint32_t>(Purpose::meet) || greeting.rank == 0) {
        return "rank 0 does not expect this yet";
      }
      if (guests[greeting.rank]) {
        return name_of_rank(greeting.rank) + " is there already (process " +
               std::to_string(present_[greeting.rank].process) +
               "); two processes claim the same rank";
      }
      return "";
    });
    int arrived = 1;
    while (arrived < place_.world) {
      look_up();
      if (now_ns() > place_.deadline_ns) {
        std::string missing;
        for (int r = 1; r < place_.world; ++r) {
          missing += guests[r] ? "" : (missing.empty() ? "" : ", ") + std::to_string(r);
        }
        throw RendezvousError(
            "rank 0: " + std::to_string(arrived) + " of " + std::to_string(place_.world) +
            " ranks came to " + net_.root + "; missing: " + missing +
            (lobby.last_refusal().empty() ? "" : "; refused: " + lobby.last_refusal()));
      }
      if (auto guest = lobby.next(kLookMs)) {
        TcpPresence& peer = present_[guest->greeting.rank];
        peer.process = guest->greeting.process;
        peer.address = std::string(guest->greeting.address,
                                   strnlen(guest->greeting.address, sizeof(Greeting::address)));
        guests[guest->greeting.rank] = std::move(guest->socket);
        ++arrived;
      }
    }
    present_[0].process = getpid();
    present_[0].costs = place_.costs;
    present_[0].address = net_.listener->local_address().text();
  }

  void hand_out(std::vector<TcpSocket>& guests) {
    std::vector<Entry> list(place_.world);
    for (int r = 0; r < place_.world; ++r) {
      list[r].process = present_[r].process;
      list[r].costs = place_.costs;
      present_[r].address.copy(list[r].address, sizeof(Entry::address) - 1);
    }
    give_all(guests, list.data(), list.size() * sizeof(Entry));
  }

  // What everybody waits for at the end of a phase, after a notice that all is well.
  void give_all(std::vector<TcpSocket>& guests, const void* data, size_t bytes) {
    Notice complete;
    complete.all_well = 1;
    for (int r = 1; r < place_.world; ++r) {
      if (!guests[r].send_all(&complete, sizeof(complete), place_.deadline_ns,
                              place_.interrupted) ||
          !guests[r].send_all(data, bytes, place_.deadline_ns, place_.interrupted)) {
        throw RendezvousError(name_of_rank(r) + " went away while the ranks were meeting");
      }
    }
  }

  // Hears from all whom they reach, and tells all.
  void share_hosts(std::vector<TcpSocket>& guests) {
    std::vector<int32_t> hosts(place_.world);
    hosts[0] = 0;
    for (int r = 1; r < place_.world; ++r) {
      if (!guests[r].receive_all(&hosts[r], sizeof(hosts[r]), place_.deadline_ns,
                                 place_.interrupted)) {
        throw RendezvousError(name_of_rank(r) + " went away while the ranks were meeting");
      }
    }
    give_all(guests, hosts.data(), hosts.size() * sizeof(hosts[0]));
    learn_hosts(hosts);
  }

  void hear_from_all(std::vector<TcpSocket>& guests) {
    for (int r = 1; r < place_.world; ++r) {
      Notice notice;
      if (!guests[r].receive_all(&notice, sizeof(notice), place_.deadline_ns + kGraceNs,
                                 place_.interrupted)) {
        throw RendezvousError(name_of_rank(r) + " went away while the ranks were connecting");
      }
      if (notice.all_well != 1) {
        notice.reason[sizeof(notice.reason) - 1] = '\0';
        throw RendezvousError(notice.reason);
      }
    }
  }

  void tell_all(std::vector<TcpSocket>& guests, const std::string& problem) {
    Notice notice;
    notice.all_well = problem.empty() ? 1 : 0;
    problem.copy(notice.reason, sizeof(notice.reason) - 1);
    for (TcpSocket& guest : guests) {
      try {
        if (guest) {
          guest.send_all(&notice, sizeof(notice), now_ns() + kGraceNs, nullptr);
        }
      } catch (const RendezvousError&) {  // it does not read: the others must still hear
      }
    }
  }

  // ---- the others ----

  void join() {
    TcpSocket root;
    std::shared_ptr<TcpSocket> listener;
    while (!root) {
      TcpSocket line = reach(net_.root, "rank 0");
      const TcpAddress here = net_.interface.empty() ? line.local_address().with_port(0)
                                                     : TcpAddress::of_interface(net_.interface);
      listener = std::make_shared<TcpSocket>(TcpSocket::listen_at(here));
      const Greeting greeting =
          greeting_of(own_, Purpose::meet, 0, listener->local_address().text());
      if (introduce(line, greeting, own_, "rank 0", place_.deadline_ns + kGraceNs,
                    place_.interrupted)) {
        root = std::move(line);
      }
    }
    std::vector<Entry> list(place_.world);
    take_given(root, list.data(), list.size() * sizeof(Entry));
    for (int r = 0; r < place_.world; ++r) {
      present_[r].process = list[r].process;
      present_[r].costs = list[r].costs;
      present_[r].address =
          std::string(list[r].address, strnlen(list[r].address, sizeof(Entry::address)));
    }
    find_own_host(root);
    Notice linked;
    try {
      link(*listener);
      linked.all_well = 1;
    } catch (const RendezvousError& problem) {
      std::string(problem.what()).copy(linked.reason, sizeof(linked.reason) - 1);
    }
    root.send_all(&linked, sizeof(linked), place_.deadline_ns + kGraceNs, place_.interrupted);
    await_notice(root);
  }

  void find_own_host(TcpSocket& root) {
    const int32_t host = mark_ ? mark_->lowest_in_reach() : place_.rank;
    std::vector<int32_t> hosts(place_.world);
    root.send_all(&host, sizeof(host), place_.deadline_ns + kGraceNs, place_.interrupted);
    take_given(root, hosts.data(), hosts.size() * sizeof(hosts[0]));
    learn_hosts(hosts);
  }

  void take_given(TcpSocket& root, void* data, size_t bytes) {
    await_notice(root);
    if (!root.receive_all(data, bytes, place_.deadline_ns + kGraceNs, place_.interrupted)) {
      throw RendezvousError(who() + "rank 0 went away while the ranks were meeting");
    }
  }

  void await_notice(TcpSocket& root) {
    Notice notice;
    bool came = false;
    try {
      came = root.receive_all(&notice, sizeof(notice), place_.deadline_ns + 2 * kGraceNs,
                              place_.interrupted);
    } catch (const RendezvousError&) {
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
    for (int r = 0; r < place_.world; ++r) {
      present_[r].host = hosts_[r];
      present_[r].lines.resize(hosts_[r] == hosts_[place_.rank] ? 0 : net_.lines);
    }
  }

  // Memory first: mates need nobody else for it, so nobody waits in a circle.
  void link(TcpSocket& listener) {
    check_hosts(hosts_);
    const MeetingPlace mates = place_of_mates(place_, hosts_);
    if (mates.world > 1) {
      std::vector<Presence> memory = meet_mates_(mates);
      for (int i = 0; i < mates.world; ++i) {
        present_[mates.members[i]].memory = std::move(memory[i]);
      }
    }
    for (int r = 0; r < place_.rank; ++r) {
      if (present_[r].is_remote()) {
        connect_lines(r);
      }
    }
    accept_lines(listener);
  }

  // Tries all addresses of a rank until one answers or the deadline is over.
  TcpSocket reach(const std::string& address, const std::string& whose) {
    std::string problem;
    const std::vector<TcpAddress> targets = TcpAddress::resolve(address);
    while (true) {
      for (const TcpAddress& target : targets) {
        if (TcpSocket line =
                TcpSocket::connect_to(target, place_.deadline_ns, place_.interrupted, &problem)) {
          return line;
        }
      }
      look_up();
      if (now_ns() > place_.deadline_ns) {
        throw RendezvousError(who() + "cannot reach " + whose + " at " + address + ": " + problem +
                              "; is it running, with the same MASTER_ADDR and MASTER_PORT, and "
                              "does no firewall stand between?");
      }
      usleep(kRetryNs / 1000);
    }
  }

  void connect_lines(int r) {
    for (int i = 0; i < net_.lines; ++i) {
      TcpSocket line = reach(present_[r].address, name_of_rank(r));
      if (!introduce(line, greeting_of(own_, Purpose::line, i, ""), own_, name_of_rank(r),
                     place_.deadline_ns, place_.interrupted)) {
        throw RendezvousError(who() + name_of_rank(r) +
                              " went away while the ranks were connecting");
      }
      present_[r].lines[i] = std::move(line);
    }
  }

  void accept_lines(TcpSocket& listener) {
    int missing = 0;
    for (int r = place_.rank + 1; r < place_.world; ++r) {
      missing += static_cast<int>(present_[r].lines.size());
    }
    Lobby lobby(listener, own_, [&](const Greeting& greeting) -> std::string {
      const bool belongs = greeting.purpose == static_cast<uint32_t>(Purpose::line) &&
                           greeting.rank > place_.rank && present_[greeting.rank].is_remote() &&
                           !present_[greeting.rank].lines[greeting.line];
      return belongs ? ""
                     : name_of_rank(greeting.rank) +
                           " is there already; two processes claim the same rank";
    });
    while (missing > 0) {
      look_up();
      if (now_ns() > place_.deadline_ns) {
        std::string late;
        for (int r = place_.rank + 1; r < place_.world; ++r) {
          const bool complete = !present_[r].is_remote() || present_[r].lines.back();
          late += complete ? "" : (late.empty() ? "" : ", ") + name_of_rank(r);
        }
        throw RendezvousError(who() + "waited in vain at " + listener.local_address().text() +
                              " for " + late +
                              "; did it end, does a firewall stand between, or is it the wrong "
                              "interface (DPCORE_SOCKET_IFNAME)?");
      }
      if (auto guest = lobby.next(kLookMs)) {
        present_[guest->greeting.rank].lines[guest->greeting.line] = std::move(guest->socket);
        --missing;
      }
    }
  }

  const MeetingPlace& place_;
  const TcpPlace& net_;
  const MeetMates& meet_mates_;
  Credentials own_;
  std::optional<HostMark> mark_;  // until the end: mates look for it at different times
  std::vector<int> hosts_;
  std::vector<TcpPresence> present_;
};

}  // namespace

std::vector<TcpPresence> meet_tcp(const MeetingPlace& place, const TcpPlace& net,
                                  const MeetMates& meet_mates) {
  if (net.lines < kMinLines || net.lines > kMaxLines) {
    throw RendezvousError("DPCORE_TCP_SOCKETS: " + std::to_string(net.lines - 1) +
                          " sockets for data; choose 1.." + std::to_string(kMaxLines - 1));
  }
  return TcpMeeting(place, net, meet_mates).run();
}

}  // namespace dpcore
