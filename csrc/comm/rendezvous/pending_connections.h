// Connections whose rank is not known yet, heard side by side: one that is silent costs the
// ranks that belong here a look, and is dropped after five seconds. Rank 0 hears them at its
// abstract socket (meet_unix) and at its TCP port (handshake).
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

enum class ConnectionState { waiting, gone, accepted };

template <class Socket, class State>  // what it has said so far
class PendingConnections {
 public:
  struct Connection {
    Socket socket;
    State state;
    int64_t leaves_at_ns = 0;
  };

  // Waits so long for something to happen. `accept` gives the next connection, or an empty one when
  // there is none now; `advance` reads what a connection says, and says what it is. The first one
  // that was accepted, if there is one.
  template <class Accept, class ListenTo>
  std::optional<Connection> next(int listener, int wait_ms, Accept accept, ListenTo advance) {
    std::vector<pollfd> entries{{listener, static_cast<short>(has_room() ? POLLIN : 0), 0}};
    for (const Connection& connection : pending_) {
      entries.push_back({connection.socket.fd(), POLLIN, 0});
    }
    poll(entries.data(), entries.size(), wait_ms);
    for (auto connection = pending_.begin(); connection != pending_.end();) {
      const ConnectionState what = advance(*connection);
      if (what == ConnectionState::accepted) {
        std::optional<Connection> accepted(std::move(*connection));
        pending_.erase(connection);
        return accepted;
      }
      const bool goes = what == ConnectionState::gone || now_ns() > connection->leaves_at_ns;
      connection = goes ? pending_.erase(connection) : std::next(connection);
    }
    while (has_room()) {
      Socket socket = accept();
      if (!socket) {
        break;
      }
      if (pending_.size() == kMost) {
        pending_.pop_front();
      }
      Connection& connection = pending_.emplace_back();
      connection.socket = std::move(socket);
      connection.leaves_at_ns = now_ns() + kPatienceNs;
    }
    return std::nullopt;
  }

 private:
  // The one that has been silent longest makes room, though not before it can have spoken: a
  // thousand ranks may come at once, and those that are not accepted yet wait in the kernel.
  bool has_room() const {
    return pending_.size() < kMost ||
           now_ns() > pending_.front().leaves_at_ns - kPatienceNs + kToSpeakNs;
  }

  static constexpr int64_t kPatienceNs = 5'000'000'000;
  static constexpr int64_t kToSpeakNs = 500'000'000;
  static constexpr size_t kMost = 256;
  std::list<Connection> pending_;
};

}  // namespace dpcore
