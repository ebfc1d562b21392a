// What all operations of one communicator share on one rank: the group, the transport, the
// stages that ordinary memory is copied through, and the counters behind stats().
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "comm/base/prefetch.h"
#include "comm/collective/path.h"
#include "comm/group/group.h"
#include "comm/operations/executor.h"
#include "comm/transport/link.h"
#include "comm/transport/transport.h"

namespace dpcore {

struct PathCounters {
  std::atomic<uint64_t> operations{0};
  std::atomic<uint64_t> bytes{0};        // of user data
  std::atomic<uint64_t> peer_reads{0};   // bytes read from, and written to, other ranks'
  std::atomic<uint64_t> peer_writes{0};  // memory; for direct and one_shot/stage, the staged copies
};

class MessageOperation;

// Messages of one direction, peer and tag in flight, in the order of the calls: the first one is
// served.
using MessageQueue = std::vector<const MessageOperation*>;
using MessageChannel = std::tuple<bool, int, uint64_t>;  // sends, peer, tag

class SharedState {
 public:
  // `link` holds messages back as a slower network would; nullptr: as fast as they go.
  SharedState(std::shared_ptr<Group> group, std::shared_ptr<Link> link);

  Group& group() const { return *group_; }
  std::shared_ptr<Group> group_ptr() const { return group_; }
  Transport& transport() const { return *transport_; }
  RunsInFlight& runs() { return runs_; }
  bool has_link() const { return link_ != nullptr; }
  // What an operation waits for after all have entered it, where there is a link.
  int64_t entry_latency_ns() const;
  // Bytes of user data that went to others as messages, and by the network with a rank's entry.
  Transport::Sent sent() const;
  // The memory behind the stage of an operation, made at first use, and the one that used it before
  // the operation; under the engine's progress lock.
  std::byte* stage(uint64_t number) {
    auto& stage = stages_[number % kStages];
    if (!stage) {
      stage = group_->endpoint().arena().allocate(kStageBytes, 4096);
    }
    stage_users_[number % kStages] = number;
    return stage.get();
  }
  // The peers' caches hold what the next operation will write first: asks for it early.
  // `stage_bytes`: as much of the stage as it is going to fill, if it is like the last one.
  void fetch_for_writing(uint64_t number, size_t stage_bytes) const {
    constexpr size_t kLine = 64;
    constexpr size_t kMostLines = 32;
    const OperationSlot& slot = group_->slot(group_->rank(), number);
    prefetch_for_writing(&slot.posted);
    prefetch_for_writing(&slot.input_offset);
    const std::byte* stage = stages_[number % kStages].get();
    for (size_t at = 0; stage != nullptr && at < std::min(stage_bytes, kMostLines * kLine);
         at += kLine) {
      prefetch_for_writing(stage + at);
    }
  }
  static constexpr uint64_t kNoOperation = ~uint64_t{0};
  uint64_t last_user_of_stage(uint64_t number) const { return stage_users_[number % kStages]; }
  // Operations that never need a stage, recorded as they are called: urgent ones that do need one
  // come past them. What is known of an operation may be forgotten when kSlotsKept others were
  // called.
  void record_needs_no_stage(uint64_t number) {
    needs_no_stage_[number % kSlotsKept].store(number + 1, std::memory_order_relaxed);
  }
  bool needs_no_stage(uint64_t number) const {
    return needs_no_stage_[number % kSlotsKept].load(std::memory_order_relaxed) == number + 1;
  }
  // Whether every rank has finished the operation and all before it. What is known of the others
  // is asked for again only when it does not say yes; under the engine's progress lock.
  bool is_over_everywhere(uint64_t number) {
    return known_over_ > number || read_what_is_over() > number;
  }
  bool is_known_over(uint64_t number) const { return known_over_ > number; }
  // Operations that ended here before the others had entered them; under the progress lock.
  void record_unchecked(uint64_t number) { unchecked_.push_back(number); }
  std::vector<uint64_t>& unchecked() { return unchecked_; }
  PathCounters& counters(Collective collective, Path path) {
    return counters_[static_cast<size_t>(collective) * kPathCount + static_cast<size_t>(path)];
  }
  // Under the progress lock. An entry lives as long as messages of the channel are in flight.
  std::map<MessageChannel, MessageQueue>& message_queues() { return message_queues_; }
  // Arena blocks that peers may still look at when this communicator is closed.
  std::vector<std::shared_ptr<std::byte>> take_blocks();

 private:
  uint64_t read_what_is_over();

  std::shared_ptr<Group> group_;
  std::shared_ptr<Link> link_;
  std::unique_ptr<Transport> transport_;
  RunsInFlight runs_;
  std::array<std::shared_ptr<std::byte>, kStages> stages_;
  std::array<uint64_t, kStages> stage_users_{kNoOperation, kNoOperation, kNoOperation,
                                             kNoOperation};
  std::array<std::atomic<uint64_t>, kSlotsKept> needs_no_stage_{};
  std::vector<uint64_t> unchecked_;  // kSlotsKept at most
  uint64_t known_over_ = 0;          // all ranks have finished what has a smaller number
  std::map<MessageChannel, MessageQueue> message_queues_;
  std::array<PathCounters, kCollectiveCount * kPathCount> counters_;
};

}  // namespace dpcore
