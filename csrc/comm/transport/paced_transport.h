// Any transport behind a link (link.h): a message is held back at its sender until the moment at
// which its last byte would have arrived, and goes on at once then.
//
// No thread spins while messages wait: next_event_ns() says when there is something to do, and
// the engine sleeps until then. What ranks say to each other about their operations is not held
// back; instead every operation waits for the link's latency when all have entered.
//
// Threads: under the engine's progress lock. Owns the transport behind it.
#pragma once

#include <memory>
#include <vector>

#include "comm/group/group.h"
#include "comm/transport/link.h"
#include "comm/transport/transport.h"

namespace dpcore {

class PacedTransport final : public Transport {
 public:
  PacedTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Link> link, const Group& group)
      : inner_(std::move(inner)), link_(std::move(link)), group_(group) {}
  ~PacedTransport() override;
  size_t push(int peer, const Message& message, const std::byte* data, size_t from) override;
  size_t pull(int peer, const Message& message, size_t from, const Sink& sink) override;
  uint64_t changes() override {
    inner_->changes();  // it forgets moments that are past
    return 0;
  }
  bool set_aside_unexpected() override { return inner_->set_aside_unexpected(); }
  void give_up() override;
  size_t segment_bytes() const override { return inner_->segment_bytes(); }
  bool takes_turns() const override { return inner_->takes_turns(); }
  size_t early_bytes(int priority) const override { return inner_->early_bytes(priority); }
  size_t window_bytes() const override;
  int64_t next_event_ns() const override;
  int64_t held_back_until_ns() const override;
  bool is_held_back(int peer) override;
  Sent sent() const override { return inner_->sent(); }
  std::vector<std::shared_ptr<std::byte>> take_blocks() override { return inner_->take_blocks(); }

 private:
  struct InTransit {
    int peer;
    MessageTag tag;
    Link::Ticket ticket;
    int64_t arrival_ns = Link::kUnknown;
    bool waits_for_room = false;  // it has arrived, and the transport behind takes no more
  };

  void forget_all();
  int64_t next_arrival_ns() const;

  std::unique_ptr<Transport> inner_;
  std::shared_ptr<Link> link_;
  const Group& group_;
  std::vector<InTransit> in_transit_;
  int waiting_for_room_ = 0;                   // of those in transit
  mutable int64_t next_arrival_ns_ = 0;        // of the others; 0: to be found out
  int64_t ingress_busy_until_ns_ = INT64_MAX;  // seen by the last pull; INT64_MAX: it was free
};

}  // namespace dpcore
