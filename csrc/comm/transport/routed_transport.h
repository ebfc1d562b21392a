// The transport of a communicator over several hosts: mailboxes in memory to the ranks of this
// host, connections to all others.
//
// Both ways cut messages in the same segments, since every rank must cut alike. An emulated link
// stands before the connections only: memory is not what it slows down.
//
// Threads: under the engine's progress lock. Owns both transports and no memory of its own.
#pragma once

#include <memory>
#include <vector>

#include "comm/group/group.h"
#include "comm/transport/transport.h"

namespace dpcore {

class RoutedTransport final : public Transport {
 public:
  RoutedTransport(const Group& group, std::unique_ptr<Transport> within,
                  std::unique_ptr<Transport> between)
      : group_(group), within_(std::move(within)), between_(std::move(between)) {}

  size_t push(int peer, const Message& message, const std::byte* data, size_t from) override {
    return way_to(peer).push(peer, message, data, from);
  }
  size_t pull(int peer, const Message& message, size_t from, const Sink& sink) override {
    return way_to(peer).pull(peer, message, from, sink);
  }
  uint64_t changes() override {
    between_->changes();  // it forgets moments that are past
    return 0;             // memory is to be looked at again and again
  }
  bool set_aside_unexpected() override {
    const bool moved = within_->set_aside_unexpected();
    return between_->set_aside_unexpected() || moved;
  }
  void give_up() override {
    within_->give_up();
    between_->give_up();
  }
  int64_t next_event_ns() const override { return between_->next_event_ns(); }
  bool is_held_back(int peer) override { return way_to(peer).is_held_back(peer); }
  size_t segment_bytes() const override { return between_->segment_bytes(); }
  size_t window_bytes() const override { return between_->window_bytes(); }
  Sent sent() const override { return {within_->sent().memory, between_->sent().network}; }
  std::vector<std::shared_ptr<std::byte>> take_blocks() override { return within_->take_blocks(); }

 private:
  Transport& way_to(int peer) const { return group_.is_remote(peer) ? *between_ : *within_; }

  const Group& group_;
  std::unique_ptr<Transport> within_;
  std::unique_ptr<Transport> between_;
};

}  // namespace dpcore
