// Few messages are on their way at a time (the executor's window): a list does.
#include "comm/transport_paced.h"

#include <algorithm>

#include "comm/clock.h"

namespace dpcore {

size_t PacedTransport::push(int peer, const Message& message, const std::byte* data, size_t from) {
  auto found = std::find_if(on_their_way_.begin(), on_their_way_.end(), [&](const OnItsWay& entry) {
    return entry.peer == peer && entry.tag == message.tag;
  });
  const int64_t now = now_ns();
  if (found == on_their_way_.end()) {
    const int64_t arrival = link_->send(group_.member(peer), message.total - from, now);
    found = on_their_way_.insert(found, {peer, message.tag, arrival});
  }
  if (now < found->arrival_ns) {
    return from;
  }
  from = inner_->push(peer, message, data, from);
  if (from == message.total) {
    on_their_way_.erase(found);
  } else {
    found->waits_for_room = true;
  }
  return from;
}

size_t PacedTransport::pull(int peer, const Message& message, size_t from, const Sink& sink) {
  const int64_t now = now_ns();
  ingress_waits_ = now < link_->ingress_free_ns();
  if (ingress_waits_) {
    return from;
  }
  const size_t have = inner_->pull(peer, message, from, sink);
  link_->receive(have - from, now);
  return have;
}

void PacedTransport::give_up() {
  on_their_way_.clear();
  inner_->give_up();
}

// Twice what is on the way at full speed: the answers of the peers take the latency as well.
size_t PacedTransport::window_bytes() const {
  double bytes = 0;
  for (int r = 0; r < group_.world(); ++r) {
    bytes = r == group_.rank() ? bytes : std::max(bytes, link_->bytes_on_the_way(group_.member(r)));
  }
  return static_cast<size_t>(2 * bytes) * static_cast<size_t>(group_.world());
}

int64_t PacedTransport::entry_latency_ns() const {
  double latency = 0;
  for (int r = 0; r < group_.world(); ++r) {
    latency = r == group_.rank() ? latency : std::max(latency, link_->latency_s(group_.member(r)));
  }
  return to_ns(latency);
}

int64_t PacedTransport::next_event_ns() const {
  int64_t next = ingress_waits_ ? link_->ingress_free_ns() : INT64_MAX;
  for (const OnItsWay& message : on_their_way_) {
    next = message.waits_for_room ? next : std::min(next, message.arrival_ns);
  }
  return next;
}

}  // namespace dpcore
