// Failures travel through abort records: the rank that finds one writes it into its own control
// block and rings; the others copy reason and culprit on, so every message names the same
// first culprit, whatever order ranks notice in.
#include "comm/group/group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "comm/base/clock.h"
#include "comm/collective/geometry.h"

namespace dpcore {
namespace {

constexpr int64_t kJustNowNs = 500'000'000;

std::string reason_in(const FailureRecord& record) {
  return std::string(record.reason, strnlen(record.reason, sizeof(record.reason)));
}

std::string seconds_since(int64_t then) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.1f s ago", static_cast<double>(now_ns() - then) * 1e-9);
  return text;
}

}  // namespace

Group::Group(std::shared_ptr<Endpoint> endpoint, std::vector<int> members, int rank,
             const std::vector<uint64_t>& offsets, std::shared_ptr<std::byte> own_block,
             std::unique_ptr<RemoteMembers> remote)
    : endpoint_(std::move(endpoint)),
      members_(std::move(members)),
      rank_(rank),
      own_block_(std::move(own_block)),
      remote_(std::move(remote)) {
  for (size_t r = 0; r < members_.size(); ++r) {
    const auto member = static_cast<int>(r);
    arenas_.push_back(is_remote(member) ? nullptr : &endpoint_->arena_of(members_[r]));
    const uint64_t offset = is_remote(member) ? 0 : offsets[r];
    controls_.push_back(reinterpret_cast<ControlBlock*>(at(member, offset)));
    if (is_remote(member)) {
      continue;
    }
    const ControlBlock& control = *controls_.back();
    if (control.magic != kControlMagic || control.version != kLayoutVersion ||
        control.rank != static_cast<int>(r) || control.world != world()) {
      throw RendezvousError(
          "rank " + std::to_string(rank_) + ": the control page of rank " + std::to_string(r) +
          " is not one of this group of " + std::to_string(world()) +
          " ranks: its layout has version " + std::to_string(control.version) + " (expected " +
          std::to_string(kLayoutVersion) + "), and it names rank " + std::to_string(control.rank) +
          " of " + std::to_string(control.world) +
          ". Install the same build of dpcore for all ranks, and start them again");
    }
  }
}

const char* Group::transport() const {
  if (remote_ == nullptr) {
    return endpoint_->shares_process() ? "inproc" : "shm";
  }
  const std::vector<int> all = hosts();
  return *std::max_element(all.begin(), all.end()) + 1 < world() ? "shm+tcp" : "tcp";
}

size_t Group::small_bytes() const {
  const bool by_frames = remote_ && (world() == 2 || endpoint_->is_one_machine());
  return by_frames ? kSmallBytesOfFrames : kSmallBytes;
}

bool Group::has_local_peers() const {
  for (int r = 0; r < world(); ++r) {
    if (r != rank_ && !is_remote(r)) {
      return true;
    }
  }
  return false;
}

std::vector<int> Group::hosts() const {
  std::map<int, int> numbers;  // by the endpoint's name of the host
  std::vector<int> hosts;
  for (const int member : members_) {
    hosts.push_back(numbers.emplace(endpoint_->host_of(member), static_cast<int>(numbers.size()))
                        .first->second);
  }
  return hosts;
}

std::unique_ptr<RemoteMembers> Group::meet_remote(const Endpoint& endpoint,
                                                  const std::vector<int>& members, int rank,
                                                  uint64_t id) {
  std::vector<bool> remote;
  for (const int member : members) {
    remote.push_back(endpoint.is_remote(member));
  }
  return std::find(remote.begin(), remote.end(), true) == remote.end()
             ? nullptr
             : std::make_unique<RemoteMembers>(*endpoint.network(), endpoint.job(), id, members,
                                               std::move(remote), rank);
}

size_t Group::control_bytes(int world) {
  return sizeof(ControlBlock) + static_cast<size_t>(world) * sizeof(std::atomic<uint64_t>);
}

void Group::prepare_control(std::byte* at, int rank, int world, const Names& names) {
  std::memset(static_cast<void*>(at), 0, control_bytes(world));
  reinterpret_cast<ControlBlock*>(at)->prepare(rank, world, names.member, names.job, names.group);
}

void Group::ring_others() const {
  Doorbell::fence_before_poll();
  for (int r = 0; r < world(); ++r) {
    if (r != rank_) {
      endpoint_->ring_if_asleep(members_[r]);
    }
  }
  if (remote_) {
    remote_->flush_all();
  }
}

// For the other groups of its ranks, which have other numbers there.
std::string Group::name() const {
  constexpr int kMostNamed = 8;
  if (world() == endpoint_->world()) {
    return "the communicator of init()";
  }
  std::string ranks;
  for (int r = 0; r < std::min(world(), kMostNamed); ++r) {
    ranks += (r == 0 ? "" : ", ") + std::to_string(members_[static_cast<size_t>(r)]);
  }
  return "the group of ranks " + ranks + (world() > kMostNamed ? ", ..." : "") + " of init()";
}

// "recv of 8 bytes from rank 3 ..." is what that rank calls, which the reader has to know first;
// "rank 3 died ..." says itself whom it is about.
std::string Group::in_words_of(int reporter, const std::string& reason) const {
  const std::string who = "rank " + std::to_string(reporter);
  if (reporter == rank_) {
    return reason;
  }
  return reason.starts_with("rank ") ? reason + " [reported by " + who + "]"
                                     : "told by " + who + ": " + reason;
}

// A rank that took the last word of a collective just before the others gave it up has gone on.
std::string Group::if_completed_here(const FailureRecord& record) const {
  const uint64_t operation = record.operation;
  const bool is_complete =
      operation != 0 &&
      slot(rank_, operation - 1).finished.load(std::memory_order_relaxed) >= operation;
  return record.reporter == rank_ || !is_complete
             ? ""
             : "; this rank had completed that operation, so what it computed since, and its "
               "model, may be one step ahead of rank " +
                   std::to_string(record.reporter) + "'s";
}

void Group::fail(const FailureRecord& record, const std::string& reason) {
  const std::string message = "rank " + std::to_string(rank_) + ": " +
                              in_words_of(record.reporter, reason) + if_completed_here(record);
  const bool is_first = failure_.set({record, message}, [&] {
    endpoint_->arena().stop_reuse();
    mine().abort.publish(AbortRecord::why_it_failed, record);
    if (remote_) {
      remote_->tell_failure(mine().abort);
    }
    endpoint_->record_failure(
        record.kind, record.culprit < 0 ? -1 : members_[static_cast<size_t>(record.culprit)],
        name_of(record.kind) + (" in " + name()) + ": " + reason);
  });
  for (int r = 0; r < world() && is_first; ++r) {
    if (r != rank_) {
      endpoint_->ring(members_[r]);
    }
  }
}

void Group::give_up(const std::string& how, uint64_t operation) {
  fail(ErrorKind::peer_lost, rank_, "rank " + std::to_string(rank_) + " " + how, operation);
  failure_.acknowledge();
}

bool Group::adopt_failure_of_peer() {
  const FailureRecord* first = nullptr;
  for (int r = 0; r < world(); ++r) {
    const FailureRecord& record = control(r).abort.failure;
    if (r != rank_ && has_failed(r) && (first == nullptr || record.when_ns < first->when_ns)) {
      first = &record;
    }
  }
  if (first == nullptr) {
    return false;
  }
  fail(*first, reason_in(*first));
  return true;
}

bool Group::fails_during(const std::string& during) {
  if (failed() || adopt_failure_of_peer()) {
    return true;
  }
  endpoint_->look_for_deaths();
  for (int r = 0; r < world(); ++r) {
    if (r != rank_ && is_dead(r) && !has_left(r)) {  // asked in this order: it ends after it left
      fail(ErrorKind::peer_lost, r,
           "rank " + std::to_string(r) + " " + endpoint_->how_it_ended(members_[r]) + " " + during);
      return true;
    }
  }
  return false;
}

bool Group::adopt_why_it_left(int r, const std::string& missed) {
  const AbortRecord& record = control(r).abort;
  if (record.state.load(std::memory_order_acquire) != AbortRecord::why_it_left) {
    return false;
  }
  fail(ErrorKind::peer_lost, record.failure.culprit,
       "rank " + std::to_string(r) + " finalized and left after an error, and " + missed +
           ". The error was " + reason_in(record.failure));
  return true;
}

void Group::leave() {
  if (endpoint_->first_failure().is_set()) {
    FailureRecord why = endpoint_->first_failure().get().record;
    const auto culprit = std::find(members_.begin(), members_.end(), why.culprit);
    why.culprit = culprit == members_.end() ? rank_ : static_cast<int>(culprit - members_.begin());
    why.reporter = rank_;
    failure_.if_none([&] { mine().abort.publish(AbortRecord::why_it_left, why); });
  }
  mine().left.store(1, std::memory_order_release);
  if (remote_) {
    remote_->tell_left(mine().abort);
  }
  for (int r = 0; r < world(); ++r) {
    if (r != rank_ && !is_remote(r)) {
      endpoint_->ring(members_[r]);
      control(r).departed.fetch_add(1, std::memory_order_acq_rel);
    }
  }
}

bool Group::all_peers_left() const {
  uint32_t gone = 0;
  for (int r = 0; r < world(); ++r) {
    // A remote rank never looks at this rank's memory. One that left has said so in `departed`.
    gone += r != rank_ && (is_remote(r) || (is_dead(r) && !has_left(r))) ? 1 : 0;
  }
  return mine().departed.load(std::memory_order_acquire) + gone + 1 >=
         static_cast<uint32_t>(world());
}

void Group::say(const Ballot& ballot) {
  mine().ballots.write(ballot);
  if (remote_) {
    remote_->tell_ballot(ballot);
  }
  ring_others();
}

// Deaths first: what is read after a death is all that the rank has ever said.
BallotView Group::look_at_ballots() {
  BallotView view;
  endpoint_->look_for_deaths();
  for (int r = 0; r < world(); ++r) {
    // Over TCP a rank that left may have closed the connection itself, and live.
    const bool is_closed = is_dead(r) && endpoint_->has_ended(members_[r]);
    if (is_closed && !(is_remote(r) && has_left(r))) {
      view.dead.add(r);
    } else if (r != rank_ && (is_dead(r) || has_left(r))) {
      view.away.add(r);
    }
    view.ballots.push_back(control(r).ballots.read());
  }
  return view;
}

void Group::finish_operation(uint64_t number) {
  mine().record_finished(number);
  HistoryEntry& entry = mine().history[number % kHistory];
  if (entry.number.load(std::memory_order_relaxed) == number + 1) {
    entry.end_ns.store(now_roughly_ns(), std::memory_order_release);
  }
  if (remote_) {
    remote_->tell_finished(number);
  }
}

void Group::show_life(int64_t now) {
  if (mine().alive_ns.exchange(now, std::memory_order_relaxed) == now) {
    return;  // another operation of the group has shown it in this look
  }
  if (remote_) {
    remote_->tell_alive(mine().message, now);
  }
}

void Group::show_message(bool sends, int peer, uint64_t tag, uint64_t bytes, int64_t since,
                         int64_t now) {
  MessageWait& message = mine().message;
  if (message.seen_ns.load(std::memory_order_relaxed) == now) {
    return;
  }
  message.show(sends, peer, tag, bytes, since, now);
}

void Group::show_placement(const std::string& text, int64_t since, int64_t now) {
  Placement& placement = mine().placement;
  const uint64_t entered = mine().operations_seen.load(std::memory_order_acquire);
  const bool stays = placement.operations.load(std::memory_order_relaxed) == entered;
  record_placement(placement, text.c_str(), since, entered, now);
  if (remote_ && stays) {
    remote_->tell_placement(placement, now);
  }
}

std::string Group::describe(uint64_t number, const Fingerprint& what) {
  const auto kind = static_cast<Collective>(what.collective);
  std::string text = "operation " + std::to_string(number) + " (" + std::string(name_of(kind));
  if (kind != Collective::barrier) {
    text += " of " + std::to_string(what.count) + " x " +
            std::string(name_of(static_cast<DType>(what.dtype)));
    if (reduces(kind)) {
      text += ", " + std::string(name_of(static_cast<ReduceOp>(what.op)));
    }
    if (has_root(kind)) {
      text += ", root " + std::to_string(what.root);
    }
  }
  return text + ")";
}

std::string Group::describe_message(bool sends, int peer, uint64_t tag, uint64_t bytes) {
  return std::string(sends ? "send" : "recv") + " of " + std::to_string(bytes) + " bytes " +
         (sends ? "to " : "from ") + (peer < 0 ? "any rank" : "rank " + std::to_string(peer)) +
         " (tag " + std::to_string(tag) + ")";
}

// "it is in recv of ...", if that is the latest that was seen of r, otherwise nothing.
std::string Group::message_of(int r) const {
  const MessageWait& message = control(r).message;
  const int64_t seen = message.seen_ns.load(std::memory_order_acquire);
  if (seen == 0) {
    return "";
  }
  const std::string what = describe_message(message.sends.load() != 0, message.peer.load(),
                                            message.tag.load(), message.bytes.load());
  return now_ns() - seen < kJustNowNs
             ? "it is in " + what + ", entered " + seconds_since(message.since_ns.load())
             : "it was last seen in " + what + ", " + seconds_since(seen);
}

std::string Group::last_operation_of(int r) const {
  const std::string message = message_of(r);
  const uint64_t seen = control(r).operations_seen.load(std::memory_order_acquire);
  if (seen == 0) {
    return message.empty() ? "it has called no collective yet" : message;
  }
  const HistoryEntry& entry = control(r).history[(seen - 1) % kHistory];
  if (entry.number.load(std::memory_order_acquire) != seen) {
    return "it is at operation " + std::to_string(seen - 1);
  }
  const int64_t end = entry.end_ns.load(std::memory_order_acquire);
  const int64_t when = end != 0 ? end : entry.begin_ns;
  if (!message.empty() && control(r).message.seen_ns.load(std::memory_order_relaxed) > when) {
    return message;
  }
  return "its last was " + describe(seen - 1, entry.fingerprint) +
         (end != 0 ? ", finished " : ", entered ") + seconds_since(when);
}

}  // namespace dpcore
