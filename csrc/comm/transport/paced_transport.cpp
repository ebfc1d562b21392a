// Few messages are on their way at a time (the executor's window): a list does.
#include "comm/transport/paced_transport.h"

#include <algorithm>

#include "comm/base/clock.h"

namespace dpcore {
namespace {

// A sender's time that is older is not of this machine's clock.
constexpr int64_t kLongestPauseNs = 1'000'000'000;

}  // namespace

PacedTransport::~PacedTransport() { forget_all(); }

size_t PacedTransport::push(int peer, const Message& message, const std::byte* data, size_t from) {
  auto found = std::find_if(in_transit_.begin(), in_transit_.end(), [&](const InTransit& entry) {
    return entry.peer == peer && entry.tag == message.tag;
  });
  const int64_t now = now_ns();
  if (found == in_transit_.end()) {
    const Link::Ticket ticket =
        link_->send(group_.member(peer), message.total - from, message.priority, now);
    found = in_transit_.insert(found, {peer, message.tag, ticket});
  }
  next_arrival_ns_ = 0;
  if (found->arrival_ns == Link::kUnknown) {
    found->arrival_ns = link_->arrival_ns(found->ticket, now);
  }
  if (now < found->arrival_ns) {
    return from;
  }
  Message with_its_time = message;
  with_its_time.due_ns = found->arrival_ns;
  from = inner_->push(peer, with_its_time, data, from);
  const bool waits_for_room = from < message.total;
  waiting_for_room_ += (waits_for_room ? 1 : 0) - (found->waits_for_room ? 1 : 0);
  found->waits_for_room = waits_for_room;
  if (!waits_for_room) {
    in_transit_.erase(found);
  }
  return from;
}

size_t PacedTransport::pull(int peer, const Message& message, size_t from, const Sink& sink) {
  const int64_t now = now_ns();
  const int64_t free = link_->ingress_free_ns(group_.member(peer), now);
  ingress_busy_until_ns_ = now < free ? free : INT64_MAX;
  if (now < free) {
    return from;
  }
  const size_t have = inner_->pull(peer, message, from, sink);
  if (have > from) {
    // Of what came while this rank was not looking, the NIC has had the time since.
    const int64_t due = inner_->due_ns();
    const bool is_plausible = due <= now && now - due < kLongestPauseNs;
    link_->receive(group_.member(peer), have - from, message.total - have,
                   is_plausible ? due : now);
  }
  return have;
}

void PacedTransport::give_up() {
  forget_all();
  inner_->give_up();
}

void PacedTransport::forget_all() {
  for (const InTransit& message : in_transit_) {
    link_->withdraw(message.ticket);
  }
  in_transit_.clear();
  waiting_for_room_ = 0;
  next_arrival_ns_ = 0;
}

// Twice what is on the way at full speed: the answers of the peers take the latency as well.
size_t PacedTransport::window_bytes() const {
  double bytes = 0;
  for (int r = 0; r < group_.world(); ++r) {
    bytes = r == group_.rank() ? bytes : std::max(bytes, link_->bytes_on_the_way(group_.member(r)));
  }
  return static_cast<size_t>(2 * bytes) * static_cast<size_t>(group_.world());
}

bool PacedTransport::is_held_back(int peer) {
  return link_->keeps_from(group_.member(peer), now_ns());
}

int64_t PacedTransport::next_event_ns() const {
  return std::min({ingress_busy_until_ns_, inner_->next_event_ns(), next_arrival_ns()});
}

int64_t PacedTransport::held_back_until_ns() const {
  return waiting_for_room_ > 0 ? 0 : next_arrival_ns();
}

// Many messages wait for the NIC, and each operation asks whenever something happens: so the answer
// is kept until one of them moves.
int64_t PacedTransport::next_arrival_ns() const {
  if (next_arrival_ns_ == 0) {
    const int64_t unknown = link_->earliest_ns();
    next_arrival_ns_ = INT64_MAX;
    for (const InTransit& message : in_transit_) {
      const bool is_known = message.arrival_ns != Link::kUnknown;
      const int64_t arrival = is_known ? message.arrival_ns : unknown;
      next_arrival_ns_ =
          message.waits_for_room ? next_arrival_ns_ : std::min(next_arrival_ns_, arrival);
    }
  }
  return next_arrival_ns_;
}

}  // namespace dpcore
