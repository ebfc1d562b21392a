// A line that is broken is silent here: the end of the control connection says which rank is lost.
#include "comm/transport/tcp_transport.h"

#include <algorithm>
#include <utility>

#include "comm/base/clock.h"

namespace dpcore {

bool TcpTransport::can_start(TcpLine& line, int priority) {
  Network& network = group_.remote()->network();
  if (!line.can_start()) {
    return false;
  }
  if (line.has_room(priority, network.precedence_of(priority), now_ns())) {
    return true;
  }
  free_ns_ = std::min(free_ns_, line.free_ns());
  return false;
}

// An urgent message that begins when the one before it has come is too late: less urgent ones have
// filled the gap, here and in the network, and it waits behind them. So it begins earlier, and
// where messages are as short as that, none waits for another.
size_t TcpTransport::early_bytes(int priority) const {
  return group_.remote()->network().overtakes(priority) ? TcpFlow::kEarlyBytes : 0;
}

// The moment at which there may be room is a change, and counts once.
void TcpTransport::record_what_is_past() const {
  if (free_ns_ != INT64_MAX && now_ns() >= free_ns_) {
    free_ns_ = INT64_MAX;
    group_.remote()->network().changes().record();
  }
}

uint64_t TcpTransport::changes() {
  record_what_is_past();
  return group_.remote()->network().changes().count();
}

// Where it is past, operations are to be asked at once; but no thread stays awake for a moment that
// none of them waits for.
int64_t TcpTransport::next_event_ns() const {
  const int64_t next = free_ns_;
  record_what_is_past();
  return next;
}

// The connection that goes on with a frame of the message, or one that can take a new frame.
TcpLine* TcpTransport::line_for(int peer, const Message& message) {
  Network& network = group_.remote()->network();
  const uint64_t group = group_.remote()->group();
  std::vector<TcpLine>& lines = network.data_lines(peer);
  for (TcpLine& line : lines) {
    if (line.is_sending(group, message.tag)) {
      return line.can_resume() ? &line : nullptr;  // broken: the check for lost peers says so
    }
  }
  if (network.is_line_wanted(peer)) {
    return nullptr;
  }
  if (message.keeps_order) {
    TcpLine& line = lines[message.tag.part % lines.size()];
    return can_start(line, message.priority) ? &line : nullptr;
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    TcpLine& line = lines[next_line_++ % lines.size()];
    if (can_start(line, message.priority)) {
      return &line;
    }
  }
  network.want_line(peer);
  return nullptr;
}

size_t TcpTransport::push(int peer, const Message& message, const std::byte* data, size_t from) {
  RemoteMembers& remote = *group_.remote();
  const size_t before = from;
  while (from < message.total && from - before < kMostAtOnce) {
    TcpLine* line = line_for(remote.peer_of(peer), message);
    if (line == nullptr) {
      break;
    }
    if (line->is_sending(remote.group(), message.tag)) {
      from += line->resume(data + from);
      continue;
    }
    FrameHeader frame;
    frame.kind = FrameKind::data;
    const size_t longest = on_one_machine_ ? kMachineFrameBytes : remote.network().frame_bytes();
    frame.bytes = static_cast<uint32_t>(std::min(longest, message.total - from));
    frame.group = remote.group();
    frame.operation = message.tag.operation;
    frame.part = message.tag.part;
    frame.total = message.total;
    frame.content = message.content;
    frame.due_us = static_cast<uint32_t>(message.due_ns / 1000);
    frame.offset = from;
    from += line->start(frame, data + from);
  }
  if (from != before) {
    sent_.store(sent_.load(std::memory_order_relaxed) + from - before, std::memory_order_relaxed);
    remote.network().changes().record();
  }
  return from;
}

size_t TcpTransport::pull(int peer, const Message& message, size_t from, const Sink& sink) {
  RemoteMembers& remote = *group_.remote();
  Network& network = remote.network();
  const int endpoint_rank = remote.peer_of(peer);
  due_ns_ = 0;  // of what was set aside it is not known
  const size_t before = from;
  from = network.take_aside(endpoint_rank, peer, remote.group(), message, from, sink);
  for (TcpLine& line : network.data_lines(endpoint_rank)) {
    while (from < message.total && from - before < kMostAtOnce) {
      const FrameHeader* head = line.head();
      if (head == nullptr || line.aside || head->group != remote.group() ||
          head->operation != message.tag.operation || head->part != message.tag.part) {
        break;
      }
      check_content(peer, message, head->total, head->content);
      line.claimed = true;
      due_ns_ = head->due_us == 0 ? 0 : due_ns_of(*head, now_ns());
      const size_t taken = line.receive(sink, network.scratch());
      from += taken;
      if (taken == 0) {
        line.claimed = from > 0 || !message.from_any;  // another rank's may come first
        break;
      }
    }
  }
  if (from != before) {
    network.changes().record();
  }
  return from;
}

bool TcpTransport::set_aside_unexpected() {
  return group_.remote()->network().set_aside_unexpected(true);
}

void TcpTransport::give_up() {
  RemoteMembers& remote = *group_.remote();
  remote.give_up();
  remote.network().changes().record();
  for (int r = 0; r < group_.world(); ++r) {
    if (!remote.contains(r)) {
      continue;
    }
    for (TcpLine& line : remote.network().data_lines(remote.peer_of(r))) {
      if (line.is_sending(remote.group())) {
        line.detach();
        line.flush();
      }
      const FrameHeader* head = line.head();
      if (head != nullptr && head->group == remote.group()) {
        line.claimed = false;
      }
    }
  }
}

}  // namespace dpcore
