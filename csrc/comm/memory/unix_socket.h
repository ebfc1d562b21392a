// Abstract Unix sockets with deadlines: fixed-size messages with descriptors, peer's user id; and
// how the ranks of a host hand descriptors to each other over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/base/fork_guard.h"

namespace dpcore {

class UnixSocket {
 public:
  UnixSocket() = default;
  explicit UnixSocket(int fd) : fd_(fd) {}

  // Listens at an abstract name. An empty socket when the name is taken.
  static UnixSocket listen_at(const std::string& name);
  // An empty socket when no process listens there (yet).
  static UnixSocket connect_to(const std::string& name);
  // The next connection, or an empty socket when none came within `wait_ms`.
  UnixSocket accept(int wait_ms);

  explicit operator bool() const { return static_cast<bool>(fd_); }
  int fd() const { return fd_.get(); }
  bool same_user() const;

  // Both return false when the other side is gone, and throw RendezvousError at the deadline.
  // Descriptors travel with the first byte.
  using Interrupt = std::function<void()>;
  bool send(const void* data, size_t bytes, const std::vector<int>& descriptors,
            int64_t deadline_ns, const Interrupt& interrupted);
  bool receive(void* data, size_t bytes, std::vector<Descriptor>* descriptors, int64_t deadline_ns,
               const Interrupt& interrupted);
  // Up to `bytes`; 0 when nothing is there now, -1 when the other side is gone. Descriptors that
  // the caller does not want are closed.
  ptrdiff_t receive_some(void* data, size_t bytes, std::vector<Descriptor>* descriptors);

 private:
  Descriptor fd_;
};

// Every rank of a host gives one descriptor to all others, over rank 0's socket:
//
//   rank r -> 0   {magic, rank} + its descriptor
//   rank 0 -> r   {magic, 0} + those of all ranks, in rank order
//
// For memory that is made later than the ranks meet (comm/rendezvous/meet_unix.cpp does the same
// with arenas). The name is a secret among the ranks; both ends check that the other has the same
// user. The result has one per rank, the own one a copy. `own` stays the caller's. Throws
// RendezvousError at the deadline, or when a rank hung up.
std::vector<Descriptor> exchange_descriptors(const std::string& name, int rank, int world, int own,
                                             int64_t deadline_ns,
                                             const UnixSocket::Interrupt& interrupted);

// A name that no other process can guess.
std::string secret_socket_name();

}  // namespace dpcore
