// Connections that have not said yet who they are, heard side by side: one that is silent costs the
// ranks that belong here a look, and is dropped after five seconds. Both lobbies are made of it, at
// rank 0's abstract socket (meet_unix) and at its TCP port (handshake).
//
// Used by one thread, while ranks meet. Owns the connections until they are accepted.
#pragma once

#include <poll.h>

#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "comm/base/clock.h"

namespace dpcore {

enum class VisitorIs { waiting, gone, accepted };

template <class Socket, class Words>  // what it has said so far
class Visitors {
 public:
  struct Visitor {
    Socket socket;
    Words words;
    int64_t leaves_at_ns = 0;
  };

  // Waits so long for something to happen. `accept` gives the next connection, or an empty one when
  // there is none now; `listen_to` reads what a visitor says, and says what it is. The first one
  // that was accepted, if there is one.
  template <class Accept, class ListenTo>
  std::optional<Visitor> next(int listener, int wait_ms, Accept accept, ListenTo listen_to) {
    std::vector<pollfd> entries{{listener, POLLIN, 0}};
    for (const Visitor& visitor : visitors_) {
      entries.push_back({visitor.socket.fd(), POLLIN, 0});
    }
    poll(entries.data(), entries.size(), wait_ms);
    for (auto visitor = visitors_.begin(); visitor != visitors_.end();) {
      const VisitorIs what = listen_to(*visitor);
      if (what == VisitorIs::accepted) {
        std::optional<Visitor> accepted(std::move(*visitor));
        visitors_.erase(visitor);
        return accepted;
      }
      const bool goes = what == VisitorIs::gone || now_ns() > visitor->leaves_at_ns;
      visitor = goes ? visitors_.erase(visitor) : std::next(visitor);
    }
    while (Socket socket = accept()) {
      if (visitors_.size() == kMost) {
        visitors_.pop_front();  // the one that has been silent longest
      }
      Visitor& visitor = visitors_.emplace_back();
      visitor.socket = std::move(socket);
      visitor.leaves_at_ns = now_ns() + kPatienceNs;
    }
    return std::nullopt;
  }

 private:
  static constexpr int64_t kPatienceNs = 5'000'000'000;
  static constexpr size_t kMost = 256;
  std::list<Visitor> visitors_;
};

}  // namespace dpcore
