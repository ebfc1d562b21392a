// Mailboxes in mapped memory: the transport between ranks of one host (processes or threads).
//
// One mailbox per ordered pair of ranks, in the sender's arena, made at its first message: a
// ring of cells, each with the tag, length and offset of the fragment it holds. The sender
// writes cells and advances `written`; the receiver reads them in place and advances `taken`.
// Reduction reads straight from the cell, so a message costs one copy and one read.
//
// Threads: both sides are driven under their engine's progress lock (one thread at a time).
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "comm/group/group.h"
#include "comm/transport/transport.h"

namespace dpcore {

class MappedTransport : public Transport {
 public:
  explicit MappedTransport(Group& group);
  size_t push(int peer, const Message& message, const std::byte* data, size_t from) override;
  size_t pull(int peer, const Message& message, size_t from, const Sink& sink) override;
  bool set_aside_unexpected() override;
  Sent sent() const override { return {sent_.load(std::memory_order_relaxed), 0}; }
  size_t segment_bytes() const override { return kSegmentBytes; }
  std::vector<std::shared_ptr<std::byte>> take_blocks() override { return std::move(owned_); }

  static constexpr size_t kCellBytes = 16384;
  static constexpr size_t kCells = 16;
  static constexpr size_t kSegmentBytes = 65536;

 private:
  struct Mailbox;
  struct Fragment {
    size_t total;
    uint64_t content;
    size_t offset;
    int64_t due_ns;
    std::vector<std::byte> bytes;
  };

  Mailbox* outgoing(int peer);
  Mailbox* incoming(int peer);
  void tell_of_room(int peer, const Mailbox& box, uint64_t taken_before);

  Group& group_;
  std::vector<Mailbox*> outgoing_;
  std::vector<Mailbox*> incoming_;
  std::vector<std::shared_ptr<std::byte>> owned_;
  std::atomic<uint64_t> sent_{0};                                   // one writer: the lock's holder
  std::vector<std::map<MessageTag, std::vector<Fragment>>> aside_;  // by peer
};

}  // namespace dpcore
