// Processes of one host meet at rank 0's abstract socket.
//
//   rank r -> 0   Hello {magic, version, sizes, world, rank, process, first_bytes} + descriptors
//   rank 0 -> r   LocalVerdict {ok} or {refused, text}
//   rank 0 -> r   for every rank: Hello + descriptors
//
// The descriptors are memfd, pidfd and, of ranks that have a network as well, an eventfd.
//
// A pidfd is made by the process that it stands for and handed over like the memfd: process
// numbers mean nothing across containers, descriptors do. A connection of another user is
// dropped unread; silent ones of the same user keep no rank waiting (pending_connections.h).
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/memory/control.h"
#include "comm/memory/unix_socket.h"
#include "comm/rendezvous/pending_connections.h"
#include "comm/rendezvous/rendezvous.h"

namespace dpcore {
namespace {

constexpr int64_t kHelloPatienceNs = 5'000'000'000;
constexpr int kEndMs = 100;  // a process that ends closes its connections a moment before
constexpr int kAcceptSliceMs = 20;

struct Hello {
  uint64_t magic = kControlMagic;
  uint32_t version = kLayoutVersion;
  uint32_t control_bytes = sizeof(ControlBlock);
  int32_t world = 0;
  int32_t rank = 0;
  int32_t process = 0;
  uint32_t word_order = 0x01020304;
  uint64_t first_bytes = 0;
  CostConstants costs;
};

struct LocalVerdict {
  uint32_t accepted = 0;
  char text[252] = {};
};

struct PartialHello {  // of a rank that comes
  Hello hello;
  std::vector<Descriptor> descriptors;
  size_t received = 0;
};

// The next rank whose greeting is complete, if one was before a short time is over.
std::optional<PendingConnections<UnixSocket, PartialHello>::Connection> next_rank(
    UnixSocket& listener, PendingConnections<UnixSocket, PartialHello>& pending) {
  const auto accept = [&] {
    UnixSocket line = listener.accept(0);
    while (line && !line.same_user()) {
      line = listener.accept(0);
    }
    return line;
  };
  return pending.next(listener.fd(), kAcceptSliceMs, accept, [](auto& connection) {
    PartialHello& partial = connection.state;
    const ptrdiff_t more = connection.socket.receive_some(
        reinterpret_cast<std::byte*>(&partial.hello) + partial.received,
        sizeof(Hello) - partial.received, &partial.descriptors);
    partial.received += more > 0 ? static_cast<size_t>(more) : 0;
    if (partial.received == sizeof(Hello)) {
      return ConnectionState::accepted;
    }
    return more < 0 ? ConnectionState::gone : ConnectionState::waiting;
  });
}

Descriptor own_pidfd() {
  Descriptor fd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!fd) {
    throw RendezvousError(
        std::string("pidfd_open failed: ") + std::strerror(errno) +
        (errno == EMFILE ? "; raise `ulimit -n`" : "; Linux 5.3 or newer is needed"));
  }
  return fd;
}

Hello own_hello(const Rendezvous& rendezvous, const Arena& arena) {
  Hello hello;
  hello.world = rendezvous.world;
  hello.rank = rendezvous.rank;
  hello.process = getpid();
  hello.first_bytes = arena.first_bytes();
  hello.costs = rendezvous.costs;
  return hello;
}

std::string refusal(const Hello& hello, const Rendezvous& rendezvous,
                    const std::vector<LocalPeer>& present, size_t descriptors, bool has_event) {
  const Hello expected;
  if (hello.magic != expected.magic || hello.version != expected.version ||
      hello.control_bytes != expected.control_bytes || hello.word_order != expected.word_order) {
    return "another version of dpcore on that rank; install the same one everywhere";
  }
  if (hello.world != rendezvous.world) {
    return "world size " + std::to_string(hello.world) + " on rank " + std::to_string(hello.rank) +
           ", " + std::to_string(rendezvous.world) + " on rank 0";
  }
  if (hello.rank <= 0 || hello.rank >= rendezvous.world) {
    return "rank " + std::to_string(hello.rank) + " does not exist in a world of " +
           std::to_string(rendezvous.world);
  }
  if (present[hello.rank].memfd) {
    return rendezvous.name_of(hello.rank) + " is there already (process " +
           std::to_string(present[hello.rank].process) + "); two processes claim the same rank";
  }
  if (descriptors != (has_event ? 3 : 2)) {
    return "no arena came with the greeting of " + rendezvous.name_of(hello.rank) +
           "; raise `ulimit -n` on " + rendezvous.name_of(0);
  }
  return "";
}

std::string missing_ranks(const std::vector<LocalPeer>& present, const Rendezvous& rendezvous) {
  std::string list;
  for (size_t r = 1; r < present.size(); ++r) {
    if (!present[r].memfd) {
      const int member = rendezvous.members.empty() ? static_cast<int>(r) : rendezvous.members[r];
      list += (list.empty() ? "" : ", ") + std::to_string(member);
    }
  }
  return list;
}

void send_verdict(UnixSocket& to, const std::string& problem, const Rendezvous& rendezvous) {
  LocalVerdict verdict;
  verdict.accepted = problem.empty() ? 1 : 0;
  std::strncpy(verdict.text, problem.c_str(), sizeof(verdict.text) - 1);
  to.send(&verdict, sizeof(verdict), {}, now_ns() + kHelloPatienceNs, rendezvous.interrupted);
}

std::vector<int> handles_of(int memfd, int pidfd, int wake_event) {
  std::vector<int> handles = {memfd, pidfd};
  if (wake_event >= 0) {
    handles.push_back(wake_event);
  }
  return handles;
}

LocalPeer local_peer_of(const Hello& hello, std::vector<Descriptor>& handles) {
  LocalPeer rank;
  rank.rank = hello.rank;
  rank.process = hello.process;
  rank.first_bytes = hello.first_bytes;
  rank.costs = hello.costs;
  rank.memfd = std::move(handles[0]);
  rank.pidfd = std::move(handles[1]);
  rank.wake_event = handles.size() > 2 ? std::move(handles[2]) : Descriptor();
  return rank;
}

// Its connection has ended, and it has not: its own deadline was earlier.
bool has_given_up(UnixSocket& line, const LocalPeer& rank) {
  std::byte ignored{};
  pollfd end{rank.pidfd.get(), POLLIN, 0};
  return line.receive_some(&ignored, sizeof(ignored), nullptr) < 0 && poll(&end, 1, kEndMs) == 0;
}

std::vector<LocalPeer> host_rendezvous(const Rendezvous& rendezvous, const Arena& arena,
                                       int wake_event) {
  UnixSocket listener = UnixSocket::listen_at(rendezvous.name);
  if (!listener) {
    throw RendezvousError(rendezvous.name_of(0) + ": another process is already rank 0 of '" +
                          rendezvous.name + "'; choose another MASTER_PORT or init_method");
  }
  std::vector<LocalPeer> present(rendezvous.world);
  std::vector<UnixSocket> lines(rendezvous.world);
  int arrived = 1;
  std::string last_refusal;
  const auto refuse_all = [&](const std::string& text) {
    for (UnixSocket& line : lines) {
      if (line) {
        send_verdict(line, text, rendezvous);
      }
    }
    throw RendezvousError(rendezvous.name_of(0) + ": " + text);
  };
  PendingConnections<UnixSocket, PartialHello> pending;
  while (arrived < rendezvous.world) {
    if (rendezvous.interrupted) {
      rendezvous.interrupted();
    }
    if (now_ns() > rendezvous.deadline_ns) {
      const std::string text = std::to_string(arrived) + " of " + std::to_string(rendezvous.world) +
                               " ranks came; missing: " + missing_ranks(present, rendezvous) +
                               (last_refusal.empty() ? "" : "; refused: " + last_refusal);
      refuse_all(text);
    }
    auto connection = next_rank(listener, pending);
    if (!connection) {
      continue;
    }
    UnixSocket& line = connection->socket;
    auto& [hello, descriptors, received] = connection->state;
    const std::string problem =
        refusal(hello, rendezvous, present, descriptors.size(), wake_event >= 0);
    if (!problem.empty()) {
      last_refusal = problem;
      send_verdict(line, problem, rendezvous);
      continue;
    }
    present[hello.rank] = local_peer_of(hello, descriptors);
    lines[hello.rank] = std::move(line);
    ++arrived;
  }
  for (int r = 1; r < rendezvous.world; ++r) {
    if (has_given_up(lines[r], present[r])) {
      refuse_all(rendezvous.name_of(r) + " came and gave up before the last one was there; start " +
                 "the ranks closer together, or give them a longer timeout");
    }
  }
  const Descriptor pidfd = own_pidfd();
  for (int to = 1; to < rendezvous.world; ++to) {
    send_verdict(lines[to], "", rendezvous);
    for (int r = 0; r < rendezvous.world; ++r) {
      Hello hello = own_hello(rendezvous, arena);
      std::vector<int> handles = handles_of(arena.fd(), pidfd.get(), wake_event);
      if (const LocalPeer& peer = present[r]; r != 0) {
        hello.rank = r;
        hello.process = peer.process;
        hello.first_bytes = peer.first_bytes;
        hello.costs = peer.costs;
        handles = handles_of(peer.memfd.get(), peer.pidfd.get(), peer.wake_event.get());
      }
      // A rank that has died already is not a reason to let the others down: all ranks hold its
      // pidfd, and the first operation names it.
      if (!lines[to].send(&hello, sizeof(hello), handles, rendezvous.deadline_ns,
                          rendezvous.interrupted)) {
        break;
      }
    }
  }
  present[0].process = getpid();
  present[0].costs = rendezvous.costs;
  return present;
}

std::vector<LocalPeer> join_rendezvous(const Rendezvous& rendezvous, const Arena& arena,
                                       int wake_event) {
  const std::string who = rendezvous.name_of(rendezvous.rank) + ": ";
  const std::string host = rendezvous.name_of(0);
  UnixSocket line;
  while (!(line = UnixSocket::connect_to(rendezvous.name))) {
    if (rendezvous.interrupted) {
      rendezvous.interrupted();
    }
    if (now_ns() > rendezvous.deadline_ns) {
      throw RendezvousError(who + host + " did not come to '" + rendezvous.name +
                            "'; is it running, with the same MASTER_ADDR and MASTER_PORT?");
    }
    usleep(2000);
  }
  if (!line.same_user()) {
    throw RendezvousError(who + "the process that listens as " + host + " belongs to another user");
  }
  const Hello hello = own_hello(rendezvous, arena);
  const Descriptor pidfd = own_pidfd();
  const std::vector<int> handles = handles_of(arena.fd(), pidfd.get(), wake_event);
  LocalVerdict verdict;
  bool answered = false;
  try {
    answered =
        line.send(&hello, sizeof(hello), handles, rendezvous.deadline_ns, rendezvous.interrupted) &&
        // Rank 0 reports missing ranks at its own deadline: give it the time to say which.
        line.receive(&verdict, sizeof(verdict), nullptr,
                     rendezvous.deadline_ns + kHelloPatienceNs / 5, rendezvous.interrupted);
  } catch (const NoAnswerError&) {
    throw RendezvousError(who + host + " listens at '" + rendezvous.name +
                          "' but did not answer before the deadline; is it stopped, or is the "
                          "name taken by another program?");
  }
  if (!answered) {
    throw RendezvousError(who + host + " went away while the ranks were meeting");
  }
  verdict.text[sizeof(verdict.text) - 1] = '\0';
  if (verdict.accepted != 1) {
    throw RendezvousError(who + "refused by rank 0: " + verdict.text);
  }
  std::vector<LocalPeer> present(rendezvous.world);
  for (int i = 0; i < rendezvous.world; ++i) {
    Hello peer;
    std::vector<Descriptor> descriptors;
    if (!line.receive(&peer, sizeof(peer), &descriptors, rendezvous.deadline_ns,
                      rendezvous.interrupted) ||
        peer.rank != i) {
      throw RendezvousError(who + host + " went away while it handed over the arenas");
    }
    if (descriptors.size() != handles.size()) {
      throw RendezvousError(who + "no descriptor is free for the arena of " +
                            rendezvous.name_of(i) + "; raise `ulimit -n`");
    }
    if (i != rendezvous.rank) {
      present[i] = local_peer_of(peer, descriptors);
    }
  }
  present[rendezvous.rank].rank = rendezvous.rank;
  present[rendezvous.rank].process = getpid();
  return present;
}

}  // namespace

std::vector<LocalPeer> meet_unix(const Rendezvous& rendezvous, const Arena& arena, int wake_event) {
  return rendezvous.rank == 0 ? host_rendezvous(rendezvous, arena, wake_event)
                              : join_rendezvous(rendezvous, arena, wake_event);
}

}  // namespace dpcore
