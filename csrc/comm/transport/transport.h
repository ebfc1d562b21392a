// Moving bytes between two ranks: what the executor of schedules and send/recv stand on.
//
// Both calls do what they can at once and return; the engine comes back when something may have
// changed. Messages of different tags may overtake each other; two of the same tag keep their
// order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/network/message.h"

namespace dpcore {

class Transport {
 public:
  virtual ~Transport() = default;
  // Copies out data[from, total) as far as there is room; returns how far it came. The copied
  // part of `data` may be changed afterwards. Messages of no bytes are not sent at all.
  virtual size_t push(int peer, const Message& message, const std::byte* data, size_t from) = 0;
  // Gives the bytes that have come to the sink, in any order; `from` is how many it had before,
  // the result how many it has now.
  virtual size_t pull(int peer, const Message& message, size_t from, const Sink& sink) = 0;
  // The due_ns of the message that pull() gave bytes of last, as its sender said.
  int64_t due_ns() const { return due_ns_; }
  // A number that changes when a push() or pull() that did nothing may do something now; 0: nobody
  // knows when, so they are to be tried again.
  virtual uint64_t changes() { return 0; }
  // Since the caller's last question. `seen` is its own, 0 before the first one.
  bool has_changed(uint64_t& seen) {
    const uint64_t before = std::exchange(seen, changes());
    return seen == 0 || seen != before;
  }
  // Called when no operation can go on: sets aside messages that no operation has asked for yet, if
  // they stand in the way of others. True when that made room.
  virtual bool set_aside_unexpected() = 0;
  // An operation of the group has failed: no operation will come back for what is on its way.
  virtual void give_up() {}
  // When a message that is held back may go on; INT64_MAX: none is.
  virtual int64_t next_event_ns() const { return INT64_MAX; }
  // Before that, no message that was pushed and has not left can go on; 0: it may at any time.
  virtual int64_t held_back_until_ns() const { return 0; }
  // Whether something of a peer that is gone may lie here and be held back. Asked at every check,
  // after nothing of it could be taken.
  virtual bool is_held_back(int) { return false; }
  // How large the segments should be that a large transfer is cut into. The same on all ranks.
  virtual size_t segment_bytes() const = 0;
  // Whether messages to one receiver hinder each other, so that senders should take turns.
  virtual bool takes_turns() const { return false; }
  // A turn comes when no more than this is missing of the message before.
  virtual size_t early_bytes(int /*priority*/) const { return 0; }
  // How much has to be on its way at a time to keep the connection busy.
  virtual size_t window_bytes() const { return 0; }
  // Bytes of messages that have left, by memory and by the network.
  struct Sent {
    uint64_t memory = 0;
    uint64_t network = 0;
  };
  virtual Sent sent() const = 0;
  // Memory that peers may still read after this transport is gone.
  virtual std::vector<std::shared_ptr<std::byte>> take_blocks() = 0;

 protected:
  int64_t due_ns_ = 0;
};

}  // namespace dpcore
