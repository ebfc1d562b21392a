// Every rank of a host gives one file descriptor to all others, over rank 0's abstract socket.
//
//   rank r -> 0   {magic, rank} + its descriptor
//   rank 0 -> r   {magic, 0} + those of all ranks, in rank order
//
// For memory that is made later than the ranks meet (comm/rendezvous/meet_unix.cpp does the same
// with arenas). The name is a secret among the ranks; both ends check that the other has the same
// user.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/base/fork_guard.h"

namespace dpcore {

// One per rank, the own one a copy. `own` stays the caller's. Throws RendezvousError at the
// deadline, or when a rank hung up.
std::vector<Descriptor> exchange_descriptors(const std::string& name, int rank, int world, int own,
                                             int64_t deadline_ns,
                                             const std::function<void()>& interrupted);

// A name that no other process can guess.
std::string secret_socket_name();

}  // namespace dpcore
