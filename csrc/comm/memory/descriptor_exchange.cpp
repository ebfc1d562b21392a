// See descriptor_exchange.h.
#include "comm/memory/descriptor_exchange.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/memory/unix_socket.h"

namespace dpcore {
namespace {

constexpr uint64_t kMagic = 0x31'64'66'65'72'6f'63'70ull;
constexpr int kAcceptSliceMs = 20;
constexpr useconds_t kNapUs = 1000;

struct Greeting {
  uint64_t magic = kMagic;
  int32_t rank = 0;
  int32_t world = 0;
};

[[noreturn]] void hung_up(int r) {
  throw RendezvousError("rank " + std::to_string(r) +
                        " hung up while descriptors of device memory were exchanged");
}

void check_time(int64_t deadline_ns, const std::function<void()>& interrupted, int missing) {
  if (interrupted) {
    interrupted();
  }
  if (now_ns() > deadline_ns) {
    throw RendezvousError("rank " + std::to_string(missing) +
                          " did not come to exchange descriptors of device memory");
  }
}

std::vector<Descriptor> gather(const std::string& name, int world, int own, int64_t deadline_ns,
                               const std::function<void()>& interrupted) {
  UnixSocket listener = UnixSocket::listen_at(name);
  if (!listener) {
    throw RendezvousError("the socket name '" + name + "' is taken");
  }
  std::vector<Descriptor> all(static_cast<size_t>(world));
  std::vector<UnixSocket> lines(static_cast<size_t>(world));
  all[0] = copy_of(own);
  for (int arrived = 1; arrived < world;) {
    const auto missing = std::find_if(all.begin(), all.end(), [](auto& fd) { return !fd; });
    check_time(deadline_ns, interrupted, static_cast<int>(missing - all.begin()));
    UnixSocket line = listener.accept(kAcceptSliceMs);
    if (!line || !line.same_user()) {
      continue;
    }
    Greeting hello;
    std::vector<Descriptor> came;
    const bool is_whole = line.receive(&hello, sizeof(hello), &came, deadline_ns, interrupted);
    if (!is_whole || hello.magic != kMagic || hello.world != world || hello.rank <= 0 ||
        hello.rank >= world || came.size() != 1 || all[static_cast<size_t>(hello.rank)]) {
      continue;  // no rank of ours
    }
    all[static_cast<size_t>(hello.rank)] = std::move(came.front());
    lines[static_cast<size_t>(hello.rank)] = std::move(line);
    ++arrived;
  }
  std::vector<int> raw;
  for (const Descriptor& fd : all) {
    raw.push_back(fd.get());
  }
  for (int r = 1; r < world; ++r) {
    const Greeting hello{kMagic, 0, world};
    if (!lines[static_cast<size_t>(r)].send(&hello, sizeof(hello), raw, deadline_ns, interrupted)) {
      hung_up(r);
    }
  }
  return all;
}

}  // namespace

std::vector<Descriptor> exchange_descriptors(const std::string& name, int rank, int world, int own,
                                             int64_t deadline_ns,
                                             const std::function<void()>& interrupted) {
  if (rank == 0) {
    return gather(name, world, own, deadline_ns, interrupted);
  }
  UnixSocket line;
  while (!(line = UnixSocket::connect_to(name))) {
    check_time(deadline_ns, interrupted, 0);
    usleep(kNapUs);
  }
  if (!line.same_user()) {
    throw RendezvousError("the process that listens at '" + name + "' belongs to another user");
  }
  Greeting hello{kMagic, rank, world};
  if (!line.send(&hello, sizeof(hello), {own}, deadline_ns, interrupted)) {
    hung_up(0);
  }
  std::vector<Descriptor> all;
  const bool is_whole = line.receive(&hello, sizeof(hello), &all, deadline_ns, interrupted);
  if (!is_whole || hello.magic != kMagic || all.size() != static_cast<size_t>(world)) {
    hung_up(0);
  }
  return all;
}

std::string secret_socket_name() {
  uint64_t words[2] = {};
  if (getrandom(words, sizeof(words), 0) != static_cast<ssize_t>(sizeof(words))) {
    throw RendezvousError("the system gives no random numbers");
  }
  char text[48];
  std::snprintf(text, sizeof(text), "dpcore-fd-%016llx%016llx",
                static_cast<unsigned long long>(words[0]),
                static_cast<unsigned long long>(words[1]));
  return text;
}

}  // namespace dpcore
