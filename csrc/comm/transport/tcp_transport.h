// Messages over the data connections of the network: the transport between ranks that share no
// memory.
//
// A message is cut into frames, and a frame goes over whichever of the peer's connections is free,
// so a slow one does not hold the others up. What arrives is received where it belongs when the
// receiver says where that is, and otherwise reduced out of memory that stays in the cache.
// Messages of send() with one tag keep their order: all of a tag go over the same connection.
//
// Ranks that are all on one machine have no NIC to share, so they need no turns. What costs time
// there is the kernel's work for every packet and every call, and what falls out of the cache on
// its way. So they cut messages less finely, into full packets of the loopback device, and keep
// less on its way (decision 81).
//
// Threads: under the engine's progress lock. Owns no memory; it loses against mapped memory always.
#pragma once

#include <algorithm>

#include "comm/group/group.h"
#include "comm/network/tcp_flow.h"
#include "comm/transport/transport.h"

namespace dpcore {

class TcpTransport final : public Transport {
 public:
  // `on_one_machine`: where all ranks are, and no emulated link stands between them.
  TcpTransport(Group& group, bool on_one_machine)
      : group_(group), on_one_machine_(on_one_machine) {}
  size_t push(int peer, const Message& message, const std::byte* data, size_t from) override;
  size_t pull(int peer, const Message& message, size_t from, const Sink& sink) override;
  bool set_aside_unexpected() override;
  void give_up() override;
  uint64_t changes() override;
  int64_t next_event_ns() const override;
  Sent sent() const override { return {0, sent_.load(std::memory_order_relaxed)}; }
  // When all of a rank's contributions have left, each of its peers still waits for the result of
  // the last segment, and a rank receives one of each peer before it has a result: the more ranks,
  // the shorter. With less, polls cost more than that saves.
  size_t segment_bytes() const override {
    if (on_one_machine_) {
      return group_.world() == 2 ? kMachineFrameBytes : 3 * kPacketBytes;
    }
    const auto pages = TcpFlow::kSegmentBytes / static_cast<size_t>(group_.world()) / kPage;
    return std::max(pages * kPage, kLeastSegmentBytes);
  }
  bool takes_turns() const override { return !on_one_machine_; }
  size_t early_bytes(int priority) const override;
  // Connections to several peers do not keep step with each other: some have to be ahead.
  size_t window_bytes() const override {
    return (on_one_machine_ ? 4 : 16) * TcpFlow::kSegmentBytes;
  }
  std::vector<std::shared_ptr<std::byte>> take_blocks() override { return {}; }

 private:
  // Fits into one packet of the loopback device, together with the header of a frame.
  static constexpr size_t kPacketBytes = size_t{60} << 10;
  static constexpr size_t kMachineFrameBytes = 8 * kPacketBytes;  // the longest, on one machine
  // Of a long message, before other operations, deadlines and signals have their turn.
  static constexpr size_t kMostAtOnce = size_t{4} << 20;
  static constexpr size_t kPage = 4096;
  static constexpr size_t kLeastSegmentBytes = size_t{32} << 10;

  TcpLine* line_for(int peer, const Message& message);
  bool can_start(TcpLine& line, int priority);
  void record_what_is_past() const;

  Group& group_;
  const bool on_one_machine_;
  size_t next_line_ = 0;
  mutable int64_t free_ns_ = INT64_MAX;  // when there may be room for a frame that waits for it
  std::atomic<uint64_t> sent_{0};        // one writer: the lock's holder
};

}  // namespace dpcore
