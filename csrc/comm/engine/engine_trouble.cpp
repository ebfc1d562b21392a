// What a thread that waits checks every kSliceNs: dead and departed peers, failures that peers
// have published, deadlines. Called under the progress lock.
#include <mutex>
#include <string>

#include "comm/base/clock.h"
#include "comm/engine/engine.h"

namespace dpcore {
namespace {

// An operation that was not seen for so long is complete; a busy machine may check late.
constexpr int64_t kOverNs = 1'000'000'000;

struct RecordedWait {
  std::mutex mutex;
  LongWait wait;
  int64_t seen_ns = 0;
};
RecordedWait first_wait;

void record_wait(const LongWait& wait, int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(first_wait.mutex);
  if (wait.called_ns <= first_wait.wait.called_ns || now_ns - first_wait.seen_ns > kOverNs) {
    first_wait.wait = wait;
    first_wait.seen_ns = now_ns;
  }
}

int find_missing_peer(const Operation& operation) {
  const Group& group = operation.group();
  for (int r = 0; r < group.world(); ++r) {
    const bool gone = group.is_dead(r) || group.has_left(r);
    if (r != group.rank() && gone && operation.needs(r)) {
      return r;
    }
  }
  return -1;
}

// Whether a peer has published a failure since it completed the operation, for which this rank may
// have all that it needs.
bool has_failed_after(const Operation& operation) {
  const Group& group = operation.group();
  for (int r = 0; r < group.world(); ++r) {
    if (r != group.rank() && group.has_failed(r) && !operation.needs(r)) {
      return true;
    }
  }
  return false;
}

void fail_for_want_of(int r, const Operation& operation) {
  Group& group = operation.group();
  const std::string missed = "is needed for " + operation.describe();
  if (group.has_left(r) && group.adopt_why_it_left(r, missed)) {
    return;
  }
  const std::string process = std::to_string(group.endpoint().process_of(group.member(r)));
  const bool in_order = group.has_left(r);
  group.fail(
      ErrorKind::peer_lost, r,
      "rank " + std::to_string(r) + " (process " + process + ") " +
          (in_order ? "finalized and left" : group.endpoint().how_it_ended(group.member(r))) +
          " and " + missed + "; " + group.last_operation_of(r) +
          (in_order ? ". All ranks have to make the same calls; if they have different "
                      "numbers of batches, train within model.join()"
                    : ". Start the job again, or call init() anew with the ranks that "
                      "remain"),
      operation.place_in_group());
}

}  // namespace

// A peer that is gone, or has failed, may have given all it had to give, after the operation was
// stepped last: a rank that sends a message and finalizes has done everything right. So all
// operations are stepped again (what one waits for may lie behind what another takes) after the
// peer was seen to be gone, and only what misses it when nothing moves any more is stuck. An
// operation that keeps this rank busy for longer than a check may take postpones the verdict to the
// next one.
bool Engine::find_missing_peers() {
  bool went_on = false;
  for (bool moved = true; moved; went_on |= moved) {
    moved = false;
    bool is_any_missing = false;
    for (const auto& operation : active_) {
      operation->missing_peer = find_missing_peer(*operation);
      is_any_missing |= operation->missing_peer >= 0 || has_failed_after(*operation);
    }
    if (!is_any_missing) {
      return went_on;
    }
    if (Network* network = endpoint_->network()) {
      network->poll();
    }
    for (size_t i = 0; i < active_.size() && !moved; ++i) {
      moved = step(i);
    }
    moved = moved || relieve_all();  // something that was not asked for yet may lie before it
    if (moved && now_ns() - last_check_ns_ > kSliceNs) {
      for (const auto& operation : active_) {
        operation->missing_peer = -1;
      }
      return true;
    }
  }
  for (const auto& operation : active_) {
    if (operation->missing_peer >= 0 && operation->is_held_back(operation->missing_peer)) {
      operation->missing_peer = -1;
    }
  }
  return went_on;
}

bool Engine::look_for_trouble() {
  last_check_ns_ = now_ns();
  if (Network* network = endpoint_->network()) {
    network->look_for_broken_lines();
  }
  endpoint_->look_for_deaths();
  const bool went_on = find_missing_peers();
  for (const auto& operation : active_) {
    operation->show_wait(last_check_ns_);
    record_wait({operation->deadline_ns - to_ns(operation->timeout_s), operation->timeout_s},
                last_check_ns_);
  }
  for (const auto& operation : active_) {
    Group& group = operation->group();
    group.show_life(last_check_ns_);
    if (group.failed() || group.adopt_failure_of_peer()) {
      continue;
    }
    if (const int r = operation->missing_peer; r >= 0) {
      fail_for_want_of(r, *operation);
    }
    const bool is_closing = last_check_ns_ >= group.closes_at_ns.load(std::memory_order_relaxed);
    if (!group.failed() && (is_closing || last_check_ns_ >= operation->deadline_ns)) {
      group.fail(ErrorKind::timeout, operation->first_late(),
                 operation->describe() + " was not complete " +
                     (is_closing ? "when close() had waited as long as a call may take"
                                 : "after " + in_seconds(operation->timeout_s)) +
                     "; " + operation->describe_late_ranks() +
                     ". Look at what the late rank does, or raise the timeout of dpcore.init() or "
                     "init_process_group()",
                 operation->place_in_group());
    }
  }
  return went_on;
}

void Engine::take_in_control() {
  if (ProgressLock lock(*this); lock) {
    endpoint_->network()->poll();
  }
}

void Engine::take_in_unexpected() {
  if (ProgressLock lock(*this); lock) {
    endpoint_->network()->poll();
    endpoint_->network()->set_aside_unexpected(false);
  }
}

LongWait longest_wait(int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(first_wait.mutex);
  return now_ns - first_wait.seen_ns > kOverNs ? LongWait{} : first_wait.wait;
}

}  // namespace dpcore
