// Processes of one host meet at rank 0's abstract socket.
//
//   rank r -> 0   Hello {magic, version, sizes, world, rank, process, reserve} + descriptors
//   rank 0 -> r   Verdict {ok} or {refused, text}
//   rank 0 -> r   for every rank: Hello + descriptors
//
// The descriptors are memfd, pidfd and, of ranks that have a network as well, an eventfd.
//
// A pidfd is made by the process that it stands for and handed over like the memfd: process
// numbers mean nothing across containers, descriptors do. A connection of another user is
// dropped unread; silent ones of the same user keep nobody waiting (pending_connections.h).
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/memory/control.h"
#include "comm/memory/unix_socket.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/pending_connections.h"

namespace dpcore {
namespace {

constexpr int64_t kHelloPatienceNs = 5'000'000'000;
constexpr int kAcceptSliceMs = 20;

struct Hello {
  uint64_t magic = kControlMagic;
  uint32_t version = kLayoutVersion;
  uint32_t control_bytes = sizeof(ControlBlock);
  int32_t world = 0;
  int32_t rank = 0;
  int32_t process = 0;
  uint32_t word_order = 0x01020304;
  uint64_t reserve = 0;
  CostConstants costs;
};

struct Verdict {
  uint32_t accepted = 0;
  char text[252] = {};
};

class Descriptors {  // closes what nobody took
 public:
  Descriptors() = default;
  Descriptors(Descriptors&& other) noexcept : list(std::exchange(other.list, {})) {}
  Descriptors& operator=(Descriptors&&) = delete;
  ~Descriptors() {
    for (int fd : list) {
      if (fd >= 0) {
        close(fd);
      }
    }
  }
  int take(size_t index) { return std::exchange(list[index], -1); }
  std::vector<int> list;
};

struct Words {  // of a rank that comes
  Hello hello;
  Descriptors descriptors;
  size_t received = 0;
};

// The next rank whose greeting is complete, if one was before a short time is over.
std::optional<Visitors<UnixSocket, Words>::Visitor> next_rank(
    UnixSocket& listener, Visitors<UnixSocket, Words>& visitors) {
  const auto accept = [&] {
    UnixSocket line = listener.accept(0);
    while (line && !line.same_user()) {
      line = listener.accept(0);
    }
    return line;
  };
  return visitors.next(listener.fd(), kAcceptSliceMs, accept, [](auto& visitor) {
    Words& words = visitor.words;
    const ptrdiff_t more =
        visitor.socket.receive_some(reinterpret_cast<std::byte*>(&words.hello) + words.received,
                                    sizeof(Hello) - words.received, &words.descriptors.list);
    words.received += more > 0 ? static_cast<size_t>(more) : 0;
    if (words.received == sizeof(Hello)) {
      return VisitorIs::accepted;
    }
    return more < 0 ? VisitorIs::gone : VisitorIs::waiting;
  });
}

int own_pidfd() {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  if (fd < 0) {
    throw RendezvousError(
        std::string("pidfd_open failed: ") + std::strerror(errno) +
        (errno == EMFILE ? "; raise `ulimit -n`" : "; Linux 5.3 or newer is needed"));
  }
  return fd;
}

Hello own_hello(const MeetingPlace& place, const Arena& arena) {
  Hello hello;
  hello.world = place.world;
  hello.rank = place.rank;
  hello.process = getpid();
  hello.reserve = arena.reserve();
  hello.costs = place.costs;
  return hello;
}

std::string refusal(const Hello& hello, const MeetingPlace& place,
                    const std::vector<Presence>& present, size_t descriptors, bool has_event) {
  const Hello expected;
  if (hello.magic != expected.magic || hello.version != expected.version ||
      hello.control_bytes != expected.control_bytes || hello.word_order != expected.word_order) {
    return "another version of dpcore on that rank; install the same one everywhere";
  }
  if (hello.world != place.world) {
    return "world size " + std::to_string(hello.world) + " on rank " + std::to_string(hello.rank) +
           ", " + std::to_string(place.world) + " on rank 0";
  }
  if (hello.rank <= 0 || hello.rank >= place.world) {
    return "rank " + std::to_string(hello.rank) + " does not exist in a world of " +
           std::to_string(place.world);
  }
  if (present[hello.rank].memfd >= 0) {
    return place.name_of(hello.rank) + " is there already (process " +
           std::to_string(present[hello.rank].process) + "); two processes claim the same rank";
  }
  if (descriptors != (has_event ? 3 : 2)) {
    return "no arena came with the greeting of " + place.name_of(hello.rank) +
           "; raise `ulimit -n` on " + place.name_of(0);
  }
  return "";
}

std::string missing_ranks(const std::vector<Presence>& present, const MeetingPlace& place) {
  std::string list;
  for (size_t r = 1; r < present.size(); ++r) {
    if (present[r].memfd < 0) {
      const int member = place.members.empty() ? static_cast<int>(r) : place.members[r];
      list += (list.empty() ? "" : ", ") + std::to_string(member);
    }
  }
  return list;
}

void send_verdict(UnixSocket& to, const std::string& problem, const MeetingPlace& place) {
  Verdict verdict;
  verdict.accepted = problem.empty() ? 1 : 0;
  std::strncpy(verdict.text, problem.c_str(), sizeof(verdict.text) - 1);
  to.send(&verdict, sizeof(verdict), {}, now_ns() + kHelloPatienceNs, place.interrupted);
}

std::vector<int> handles_of(const Presence& rank) {
  std::vector<int> handles = {rank.memfd, rank.pidfd};
  if (rank.wake_event >= 0) {
    handles.push_back(rank.wake_event);
  }
  return handles;
}

std::vector<int> own_handles(const Arena& arena, int pidfd, int wake_event) {
  Presence self;
  self.memfd = arena.fd();
  self.pidfd = pidfd;
  self.wake_event = wake_event;
  return handles_of(self);
}

Presence presence_of(const Hello& hello, Descriptors& handles) {
  Presence rank;
  rank.rank = hello.rank;
  rank.process = hello.process;
  rank.reserve = hello.reserve;
  rank.costs = hello.costs;
  rank.memfd = handles.take(0);
  rank.pidfd = handles.take(1);
  rank.wake_event = handles.list.size() > 2 ? handles.take(2) : -1;
  return rank;
}

std::vector<Presence> host_meeting(const MeetingPlace& place, const Arena& arena, int wake_event) {
  UnixSocket listener = UnixSocket::listen_at(place.name);
  if (!listener) {
    throw RendezvousError(place.name_of(0) + ": another process is already rank 0 of '" +
                          place.name + "'; choose another MASTER_PORT or init_method");
  }
  std::vector<Presence> present(place.world);
  std::vector<UnixSocket> lines(place.world);
  int arrived = 1;
  std::string last_refusal;
  Visitors<UnixSocket, Words> visitors;
  try {
    while (arrived < place.world) {
      if (place.interrupted) {
        place.interrupted();
      }
      if (now_ns() > place.deadline_ns) {
        const std::string text = std::to_string(arrived) + " of " + std::to_string(place.world) +
                                 " ranks came; missing: " + missing_ranks(present, place) +
                                 (last_refusal.empty() ? "" : "; refused: " + last_refusal);
        for (UnixSocket& line : lines) {
          if (line) {
            send_verdict(line, text, place);
          }
        }
        throw RendezvousError(place.name_of(0) + ": " + text);
      }
      auto visitor = next_rank(listener, visitors);
      if (!visitor) {
        continue;
      }
      UnixSocket& line = visitor->socket;
      const Hello& hello = visitor->words.hello;
      Descriptors& descriptors = visitor->words.descriptors;
      const std::string problem =
          refusal(hello, place, present, descriptors.list.size(), wake_event >= 0);
      if (!problem.empty()) {
        last_refusal = problem;
        send_verdict(line, problem, place);
        continue;
      }
      present[hello.rank] = presence_of(hello, descriptors);
      lines[hello.rank] = std::move(line);
      ++arrived;
    }
    Descriptors own;
    own.list = {own_pidfd()};
    for (int to = 1; to < place.world; ++to) {
      send_verdict(lines[to], "", place);
      for (int r = 0; r < place.world; ++r) {
        Hello hello = own_hello(place, arena);
        if (r != 0) {
          hello.rank = r;
          hello.process = present[r].process;
          hello.reserve = present[r].reserve;
          hello.costs = present[r].costs;
        }
        const std::vector<int> handles =
            r == 0 ? own_handles(arena, own.list[0], wake_event) : handles_of(present[r]);
        // A rank that is gone already is no reason to let the others down: everybody holds its
        // pidfd, and the first operation names it.
        if (!lines[to].send(&hello, sizeof(hello), handles, place.deadline_ns, place.interrupted)) {
          break;
        }
      }
    }
  } catch (...) {
    std::for_each(present.begin(), present.end(), close_all);
    throw;
  }
  present[0].process = getpid();
  present[0].costs = place.costs;
  return present;
}

std::vector<Presence> join_meeting(const MeetingPlace& place, const Arena& arena, int wake_event) {
  const std::string who = place.name_of(place.rank) + ": ";
  const std::string host = place.name_of(0);
  UnixSocket line;
  while (!(line = UnixSocket::connect_to(place.name))) {
    if (place.interrupted) {
      place.interrupted();
    }
    if (now_ns() > place.deadline_ns) {
      throw RendezvousError(who + host + " did not come to '" + place.name +
                            "'; is it running, with the same MASTER_ADDR and MASTER_PORT?");
    }
    usleep(2000);
  }
  if (!line.same_user()) {
    throw RendezvousError(who + "the process that listens as " + host + " belongs to another user");
  }
  const Hello hello = own_hello(place, arena);
  Descriptors own;
  own.list = {own_pidfd()};
  const std::vector<int> handles = own_handles(arena, own.list[0], wake_event);
  Verdict verdict;
  bool answered = false;
  try {
    answered = line.send(&hello, sizeof(hello), handles, place.deadline_ns, place.interrupted) &&
               // Rank 0 reports missing ranks at its own deadline: give it the time to say which.
               line.receive(&verdict, sizeof(verdict), nullptr,
                            place.deadline_ns + kHelloPatienceNs / 5, place.interrupted);
  } catch (const RendezvousError&) {
    throw RendezvousError(who + host + " listens at '" + place.name +
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
  std::vector<Presence> present(place.world);
  try {
    for (int i = 0; i < place.world; ++i) {
      Hello peer;
      Descriptors descriptors;
      if (!line.receive(&peer, sizeof(peer), &descriptors.list, place.deadline_ns,
                        place.interrupted) ||
          peer.rank != i) {
        throw RendezvousError(who + host + " went away while it handed over the arenas");
      }
      if (descriptors.list.size() != handles.size()) {
        throw RendezvousError(who + "no descriptor is free for the arena of " + place.name_of(i) +
                              "; raise `ulimit -n`");
      }
      if (i != place.rank) {
        present[i] = presence_of(peer, descriptors);
      }
    }
  } catch (...) {
    std::for_each(present.begin(), present.end(), close_all);
    throw;
  }
  present[place.rank].rank = place.rank;
  present[place.rank].process = getpid();
  return present;
}

}  // namespace

std::vector<Presence> meet_unix(const MeetingPlace& place, const Arena& arena, int wake_event) {
  return place.rank == 0 ? host_meeting(place, arena, wake_event)
                         : join_meeting(place, arena, wake_event);
}

void close_all(Presence& presence) {
  for (int* fd : {&presence.memfd, &presence.pidfd, &presence.wake_event}) {
    if (*fd >= 0) {
      close(std::exchange(*fd, -1));
    }
  }
}

}  // namespace dpcore
