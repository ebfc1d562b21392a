// Data frames that nobody asks for: set aside when they stand in the way of others.
//
// Collectives send data only after every rank has entered, so what is found here are messages
// whose receive has not been called yet, and segments that are ahead of this rank's window.
#include <cstring>
#include <mutex>

#include "comm/network/network.h"

namespace dpcore {

bool Network::is_wanted(uint64_t group) {
  const std::lock_guard<SpinLock> hold(groups_lock_);
  for (const auto& [number, target] : groups_) {
    if (number == group) {
      return target->wants_data();
    }
  }
  return false;
}

void Network::forget_closed_groups() {
  for (const auto& peer : peers_) {
    if (!peer) {
      continue;
    }
    std::erase_if(peer->aside, [&](const auto& entry) {
      const bool goes = !is_wanted(entry.first.first);
      for (const Fragment& fragment : entry.second) {
        peer->aside_bytes -= goes ? fragment.bytes.size() : 0;
      }
      return goes;
    });
  }
}

bool Network::set_aside_unexpected() {
  if (groups_closed_.exchange(false, std::memory_order_acq_rel)) {
    forget_closed_groups();
  }
  bool moved = false;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    if (peers_[r]) {
      for (TcpLine& line : peers_[r]->data) {
        while (set_aside(r, line)) {
          moved = true;
        }
      }
    }
  }
  return moved;
}

// One frame, or what has come of it. A frame that an operation has begun to take is left to it.
bool Network::set_aside(int from, TcpLine& line) {
  Peer& peer = *peers_[from];
  const FrameHeader* head = line.head();
  if (head == nullptr || line.claimed) {
    return false;
  }
  const FrameHeader frame = *head;  // the line forgets it with its last byte
  if (!line.aside) {
    const bool wanted = is_wanted(frame.group);
    if (wanted && peer.aside_bytes + frame.bytes > kMaxAsideBytes) {
      return false;
    }
    line.aside = true;
    line.kept.resize(wanted ? frame.bytes : 0);
    peer.aside_bytes += line.kept.size();
  }
  auto keep = [&](const std::byte* data, size_t offset, size_t bytes) {
    if (!line.kept.empty()) {
      std::memcpy(line.kept.data() + (offset - frame.offset), data, bytes);
    }
  };
  const bool moved = line.receive(Sink(keep), scratch_.get()) > 0;
  if (!line.aside && !line.kept.empty()) {  // it is complete
    peer.aside[{frame.group, {frame.operation, frame.part}}].push_back(
        {frame.total, frame.content, frame.offset, std::move(line.kept)});
    line.kept.clear();
  }
  return moved;
}

size_t Network::take_aside(int from, int named, uint64_t group, const Message& message, size_t have,
                           const Sink& sink) {
  Peer& peer = *peers_[from];
  const auto found = peer.aside.find({group, message.tag});
  if (found == peer.aside.end()) {
    return have;
  }
  // A later message may bear the same tag: only what belongs to this one goes.
  std::vector<Fragment>& fragments = found->second;
  size_t used = 0;
  while (used < fragments.size() && have < message.total) {
    const Fragment& fragment = fragments[used++];
    check_content(named, message, fragment.total, fragment.content);
    if (sink.destination() != nullptr) {
      std::memcpy(sink.destination() + fragment.offset, fragment.bytes.data(),
                  fragment.bytes.size());
    } else {
      sink(fragment.bytes.data(), fragment.offset, fragment.bytes.size());
    }
    have += fragment.bytes.size();
    peer.aside_bytes -= fragment.bytes.size();
  }
  fragments.erase(fragments.begin(), fragments.begin() + static_cast<ptrdiff_t>(used));
  if (fragments.empty()) {
    peer.aside.erase(found);
  }
  return have;
}

}  // namespace dpcore
