// See mapped_transport.h for the picture. The only stores into another rank's arena are those
// of `taken`.
#include "comm/transport/mapped_transport.h"

#include <algorithm>

#include "comm/reduce/reduce.h"

namespace dpcore {

struct MappedTransport::Mailbox {
  struct alignas(64) Cell {
    MessageTag tag;
    uint64_t total;
    uint64_t content;
    uint64_t offset;
    uint64_t bytes;
    int64_t due_ns;
    alignas(64) std::byte data[kCellBytes];
  };
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> taken;
  Cell cells[kCells];
};

MappedTransport::MappedTransport(Group& group)
    : group_(group),
      outgoing_(group.world(), nullptr),
      incoming_(group.world(), nullptr),
      aside_(group.world()) {}

MappedTransport::Mailbox* MappedTransport::outgoing(int peer) {
  if (outgoing_[peer] == nullptr) {
    Arena& arena = group_.endpoint().arena();
    auto block = arena.allocate(sizeof(Mailbox), 64);
    auto* box = reinterpret_cast<Mailbox*>(block.get());
    box->written.store(0, std::memory_order_relaxed);
    box->taken.store(0, std::memory_order_relaxed);
    owned_.push_back(std::move(block));
    outgoing_[peer] = box;
    group_.mailboxes(group_.rank())[peer].store(arena.offset_of(box, sizeof(Mailbox)),
                                                std::memory_order_release);
  }
  return outgoing_[peer];
}

MappedTransport::Mailbox* MappedTransport::incoming(int peer) {
  if (incoming_[peer] == nullptr) {
    const uint64_t offset = group_.mailboxes(peer)[group_.rank()].load(std::memory_order_acquire);
    if (offset != 0) {
      incoming_[peer] = reinterpret_cast<Mailbox*>(group_.at(peer, offset));
    }
  }
  return incoming_[peer];
}

size_t MappedTransport::push(int peer, const Message& message, const std::byte* data, size_t from) {
  const size_t total = message.total;
  Mailbox& box = *outgoing(peer);
  const size_t before = from;
  const uint64_t first = box.written.load(std::memory_order_relaxed);
  uint64_t written = first;
  // The thread that runs on this processor next finds the data in its caches.
  const auto copy =
      group_.endpoint().takes_turns_with(group_.member(peer)) ? copy_bytes : copy_to_peers;
  while (from < total && written - box.taken.load(std::memory_order_acquire) < kCells) {
    Mailbox::Cell& cell = box.cells[written % kCells];
    cell.tag = message.tag;
    cell.total = total;
    cell.content = message.content;
    cell.due_ns = message.due_ns;
    cell.offset = from;
    cell.bytes = std::min(kCellBytes, total - from);
    copy(cell.data, data + from, cell.bytes);
    from += cell.bytes;
    box.written.store(++written, std::memory_order_release);
  }
  if (written != first) {
    sent_.store(sent_.load(std::memory_order_relaxed) + from - before, std::memory_order_relaxed);
    group_.ring(peer);
  }
  return from;
}

size_t MappedTransport::pull(int peer, const Message& message, size_t from, const Sink& sink) {
  const MessageTag& tag = message.tag;
  const size_t total = message.total;
  if (auto& aside = aside_[peer]; !aside.empty()) {
    if (const auto found = aside.find(tag); found != aside.end()) {
      // A later message may bear the same tag: only what belongs to this one goes.
      std::vector<Fragment>& fragments = found->second;
      size_t used = 0;
      while (used < fragments.size() && from < total) {
        const Fragment& fragment = fragments[used++];
        check_content(peer, message, fragment.total, fragment.content);
        sink(fragment.bytes.data(), fragment.offset, fragment.bytes.size());
        due_ns_ = fragment.due_ns;
        from += fragment.bytes.size();
      }
      fragments.erase(fragments.begin(), fragments.begin() + static_cast<ptrdiff_t>(used));
      if (fragments.empty()) {
        aside.erase(found);
      }
    }
  }
  Mailbox* box = incoming(peer);
  if (box == nullptr || from == total) {
    return from;
  }
  const uint64_t first = box->taken.load(std::memory_order_relaxed);
  uint64_t taken = first;
  while (from < total && taken != box->written.load(std::memory_order_acquire)) {
    const Mailbox::Cell& cell = box->cells[taken % kCells];
    if (cell.tag != tag) {
      break;
    }
    check_content(peer, message, cell.total, cell.content);
    sink(cell.data, cell.offset, cell.bytes);
    due_ns_ = cell.due_ns;
    from += cell.bytes;
    box->taken.store(++taken, std::memory_order_release);
  }
  if (taken != first) {
    if (group_.endpoint().oversubscribed()) {
      group_.endpoint().record_processor();  // for the peer's next message
    }
    tell_of_room(peer, *box, first);
  }
  return from;
}

// The sender sleeps for room only if it saw no empty cell. A ring for nothing costs both ranks a
// call of the kernel, and the sender a turn on its processor.
void MappedTransport::tell_of_room(int peer, const Mailbox& box, uint64_t taken_before) {
  Doorbell::fence_before_poll();
  if (box.written.load(std::memory_order_relaxed) - taken_before >= kCells) {
    group_.ring(peer);
  }
}

bool MappedTransport::set_aside_unexpected() {
  bool moved = false;
  for (int peer = 0; peer < group_.world(); ++peer) {
    Mailbox* box = peer == group_.rank() ? nullptr : incoming(peer);
    if (box == nullptr) {
      continue;
    }
    const uint64_t taken = box->taken.load(std::memory_order_relaxed);
    if (taken == box->written.load(std::memory_order_acquire)) {
      continue;
    }
    const Mailbox::Cell& cell = box->cells[taken % kCells];
    aside_[peer][cell.tag].push_back(
        {cell.total, cell.content, cell.offset, cell.due_ns, {cell.data, cell.data + cell.bytes}});
    box->taken.store(taken + 1, std::memory_order_release);
    tell_of_room(peer, *box, taken);
    moved = true;
  }
  return moved;
}

}  // namespace dpcore
