// Plain blocking-with-poll I/O: a rendezvous moves a few hundred bytes once.
#include "comm/memory/unix_socket.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "comm/base/clock.h"
#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr size_t kMaxDescriptors = 253;  // SCM_MAX_FD of Linux
constexpr int kPollSliceMs = 20;
constexpr int kRetryUs = 1000;

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) {
    throw RendezvousError("socket name '" + name + "' is too long");
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading NUL: abstract
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int new_socket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    throw RendezvousError(std::string("cannot make a Unix socket: ") + std::strerror(errno) +
                          "; check `ulimit -n`");
  }
  return fd;
}

// Throws whatever ends the wait.
void look_up(int64_t deadline_ns, const UnixSocket::Interrupt& interrupted) {
  if (interrupted) {
    interrupted();
  }
  if (now_ns() > deadline_ns) {
    throw NoAnswerError("no answer from the other ranks before the deadline");
  }
}

void wait_for(int fd, short events, int64_t deadline_ns, const UnixSocket::Interrupt& interrupted) {
  pollfd entry{fd, events, 0};
  while (poll(&entry, 1, kPollSliceMs) <= 0) {
    look_up(deadline_ns, interrupted);
  }
}

}  // namespace

UnixSocket UnixSocket::listen_at(const std::string& name) {
  UnixSocket listener(new_socket());
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  if (bind(listener.fd_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EADDRINUSE) {
      return UnixSocket();
    }
    throw RendezvousError("cannot bind the Unix socket " + name +
                          ", at which ranks of this host meet: " + std::strerror(errno) +
                          ". Where the system forbids such sockets, pass transport='tcp' to "
                          "dpcore.init() on all ranks");
  }
  if (listen(listener.fd_.get(), 1024) != 0) {
    throw RendezvousError("cannot listen on the Unix socket " + name +
                          ", at which ranks of this host meet: " + std::strerror(errno));
  }
  return listener;
}

UnixSocket UnixSocket::connect_to(const std::string& name) {
  UnixSocket socket(new_socket());
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  if (connect(socket.fd_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    return UnixSocket();
  }
  return socket;
}

UnixSocket UnixSocket::accept(int wait_ms) {
  pollfd entry{fd_.get(), POLLIN, 0};
  if (poll(&entry, 1, wait_ms) <= 0) {
    return UnixSocket();
  }
  const int fd = accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
    throw RendezvousError(std::string("cannot accept the other ranks: ") + std::strerror(errno) +
                          "; raise `ulimit -n`");
  }
  return UnixSocket(fd);
}

bool UnixSocket::same_user() const {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == geteuid();
}

bool UnixSocket::send(const void* data, size_t bytes, const std::vector<int>& descriptors,
                      int64_t deadline_ns, const Interrupt& interrupted) {
  const auto* from = static_cast<const char*>(data);
  size_t sent = 0;
  while (sent < bytes) {
    wait_for(fd_.get(), POLLOUT, deadline_ns, interrupted);
    iovec part{const_cast<char*>(from + sent), bytes - sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    std::vector<char> control;
    if (sent == 0 && !descriptors.empty()) {
      control.resize(CMSG_SPACE(descriptors.size() * sizeof(int)));
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    }
    const ssize_t n = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == ETOOMANYREFS) {  // descriptors on their way to receivers of this user
      look_up(deadline_ns, interrupted);
      usleep(kRetryUs);
    } else if (errno != EAGAIN && errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool UnixSocket::receive(void* data, size_t bytes, std::vector<Descriptor>* descriptors,
                         int64_t deadline_ns, const Interrupt& interrupted) {
  auto* to = static_cast<char*>(data);
  size_t received = 0;
  while (received < bytes) {
    wait_for(fd_.get(), POLLIN, deadline_ns, interrupted);
    const ptrdiff_t more = receive_some(to + received, bytes - received, descriptors);
    if (more < 0) {
      return false;
    }
    received += static_cast<size_t>(more);
  }
  return true;
}

ptrdiff_t UnixSocket::receive_some(void* data, size_t bytes, std::vector<Descriptor>* descriptors) {
  std::vector<char> control(CMSG_SPACE(kMaxDescriptors * sizeof(int)));
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t received = recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (received <= 0) {
    return received < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        Descriptor came(fd);
        if (descriptors != nullptr) {
          descriptors->push_back(std::move(came));
        }
      }
    }
  }
  return received;
}

// ---- all descriptors to all ranks

namespace {

constexpr uint64_t kMagic = 0x31'64'66'65'72'6f'63'70ull;

struct Greeting {
  uint64_t magic = kMagic;
  int32_t rank = 0;
  int32_t world = 0;
};

[[noreturn]] void hung_up(int r) {
  throw RendezvousError("rank " + std::to_string(r) +
                        " hung up while descriptors of device memory were exchanged");
}

void check_time(int64_t deadline_ns, const UnixSocket::Interrupt& interrupted, int missing) {
  if (interrupted) {
    interrupted();
  }
  if (now_ns() > deadline_ns) {
    throw RendezvousError("rank " + std::to_string(missing) +
                          " did not come to exchange descriptors of device memory");
  }
}

std::vector<Descriptor> gather(const std::string& name, int world, int own, int64_t deadline_ns,
                               const UnixSocket::Interrupt& interrupted) {
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
    UnixSocket line = listener.accept(kPollSliceMs);
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
                                             const UnixSocket::Interrupt& interrupted) {
  if (rank == 0) {
    return gather(name, world, own, deadline_ns, interrupted);
  }
  UnixSocket line;
  while (!(line = UnixSocket::connect_to(name))) {
    check_time(deadline_ns, interrupted, 0);
    usleep(kRetryUs);
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
