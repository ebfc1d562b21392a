// What communicators of hosts and of devices do alike with a request before it runs.
#include "comm/collective/request.h"

#include <string>

#include "comm/base/error.h"

namespace dpcore {

void check_operator(const Request& request) {
  if (!is_valid(request.op, request.dtype)) {
    throw Unsupported(std::string(name_of(request.op)) + " has no meaning for " +
                      std::string(name_of(request.dtype)));
  }
}

void check_peer(int peer, int rank, int world) {
  if (peer < 0 || peer >= world || peer == rank) {
    throw Unsupported("rank " + std::to_string(rank) + " can't exchange a message with " +
                      std::to_string(peer) + ": choose another rank of 0.." +
                      std::to_string(world - 1));
  }
}

}  // namespace dpcore
