// Stages are made when the first operation needs them: a program that keeps its data in the
// arena never pays for them.
#include "comm/operations/shared_state.h"

#include <algorithm>

#include "comm/base/clock.h"
#include "comm/transport/mapped_transport.h"
#include "comm/transport/paced_transport.h"
#include "comm/transport/routed_transport.h"
#include "comm/transport/tcp_transport.h"

namespace dpcore {

SharedState::SharedState(std::shared_ptr<Group> group, std::shared_ptr<Link> link)
    : group_(std::move(group)), link_(std::move(link)) {
  unchecked_.reserve(kSlotsKept);
  if (group_->remote() != nullptr) {
    transport_ =
        std::make_unique<TcpTransport>(*group_, !link_ && group_->endpoint().is_one_machine());
  } else {
    transport_ = std::make_unique<MappedTransport>(*group_);
  }
  if (link_) {
    transport_ = std::make_unique<PacedTransport>(std::move(transport_), link_, *group_);
  }
  if (group_->remote() != nullptr && group_->has_local_peers()) {
    transport_ = std::make_unique<RoutedTransport>(
        *group_, std::make_unique<MappedTransport>(*group_), std::move(transport_));
  }
}

int64_t SharedState::entry_latency_ns() const {
  double latency = 0;
  for (int r = 0; r < group_->world(); ++r) {
    latency =
        r == group_->rank() ? latency : std::max(latency, link_->latency_s(group_->member(r)));
  }
  return to_ns(latency);
}

Transport::Sent SharedState::sent() const {
  Transport::Sent sent = transport_->sent();
  sent.network += group_->remote() == nullptr ? 0 : group_->remote()->posted_bytes();
  return sent;
}

uint64_t SharedState::read_what_is_over() {
  uint64_t over = kNoOperation;
  for (int r = 0; r < group_->world(); ++r) {
    over = std::min(over, group_->control(r).over_below.load(std::memory_order_acquire));
  }
  return known_over_ = over;
}

std::vector<std::shared_ptr<std::byte>> SharedState::take_blocks() {
  std::vector<std::shared_ptr<std::byte>> blocks = transport_->take_blocks();
  for (auto& stage : stages_) {
    if (stage) {
      blocks.push_back(std::move(stage));
    }
  }
  return blocks;
}

}  // namespace dpcore
