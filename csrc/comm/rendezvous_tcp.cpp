// Phases: gather (all ranks at rank 0), link (all pairs), and the word to go.
#include "comm/rendezvous_tcp.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/clock.h"
#include "comm/error.h"
#include "comm/tcp_handshake.h"

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
};

std::string name_of_rank(int r) { return "rank " + std::to_string(r); }

class TcpMeeting {
 public:
  TcpMeeting(const MeetingPlace& place, const TcpPlace& net)
      : place_(place),
        net_(net),
        own_{place.name, net.secret, place.rank, place.world, net.lines},
        present_(place.world) {
    for (int r = 0; r < place.world; ++r) {
      present_[r].lines.resize(r == place.rank ? 0 : net.lines);
    }
  }

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
      accept_lines(*net_.listener);
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
    present_[0].address = net_.listener->local_address().text();
  }

  void hand_out(std::vector<TcpSocket>& guests) {
    std::vector<Entry> list(place_.world);
    for (int r = 0; r < place_.world; ++r) {
      list[r].process = present_[r].process;
      present_[r].address.copy(list[r].address, sizeof(Entry::address) - 1);
    }
    Notice complete;
    complete.all_well = 1;
    for (int r = 1; r < place_.world; ++r) {
      if (!guests[r].send_all(&complete, sizeof(complete), place_.deadline_ns,
                              place_.interrupted) ||
          !guests[r].send_all(list.data(), list.size() * sizeof(Entry), place_.deadline_ns,
                              place_.interrupted)) {
        throw RendezvousError(name_of_rank(r) + " went away while the ranks were meeting");
      }
    }
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
    await_notice(root);
    std::vector<Entry> list(place_.world);
    if (!root.receive_all(list.data(), list.size() * sizeof(Entry), place_.deadline_ns + kGraceNs,
                          place_.interrupted)) {
      throw RendezvousError(who() + "rank 0 went away while the ranks were meeting");
    }
    for (int r = 0; r < place_.world; ++r) {
      present_[r].process = list[r].process;
      present_[r].address =
          std::string(list[r].address, strnlen(list[r].address, sizeof(Entry::address)));
    }
    Notice linked;
    try {
      for (int r = 0; r < place_.rank; ++r) {
        connect_lines(r);
      }
      accept_lines(*listener);
      linked.all_well = 1;
    } catch (const RendezvousError& problem) {
      std::string(problem.what()).copy(linked.reason, sizeof(linked.reason) - 1);
    }
    root.send_all(&linked, sizeof(linked), place_.deadline_ns + kGraceNs, place_.interrupted);
    await_notice(root);
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
    int missing = (place_.world - 1 - place_.rank) * net_.lines;
    Lobby lobby(listener, own_, [&](const Greeting& greeting) -> std::string {
      const bool belongs = greeting.purpose == static_cast<uint32_t>(Purpose::line) &&
                           greeting.rank > place_.rank &&
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
          const bool complete = static_cast<bool>(present_[r].lines.back());
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
  Credentials own_;
  std::vector<TcpPresence> present_;
};

}  // namespace

std::vector<TcpPresence> meet_tcp(const MeetingPlace& place, const TcpPlace& net) {
  if (net.lines < kMinLines || net.lines > kMaxLines) {
    throw RendezvousError("DPCORE_TCP_SOCKETS: " + std::to_string(net.lines - 1) +
                          " sockets for data; choose 1.." + std::to_string(kMaxLines - 1));
  }
  return TcpMeeting(place, net).run();
}

}  // namespace dpcore
