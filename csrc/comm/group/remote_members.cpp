// Frames to mirrors and back. A mirror is memory that is taken when it is touched: pages of stages
// that no small operation has used never are.
#include "comm/group/remote_members.h"

#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr size_t kPage = 4096;
// Counters of chunks: everything that a small operation has to show came with its post.
constexpr uint64_t kEverything = ~uint64_t{0};

}  // namespace

// Where no descriptor is left, or a file may not be so long, `dpcore inspect` cannot read it, which
// is no reason to fail.
RemoteMembers::Memory::Memory(size_t bytes)
    : fd_(static_cast<int>(syscall(SYS_memfd_create, "dpcore-mirrors", MFD_CLOEXEC))),
      bytes_(bytes) {
  if (fd_ && ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) {
    fd_ = Descriptor();
  }
  const int flags = fd_ ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd_.get(), 0);
  if (at == MAP_FAILED) {
    throw Error(std::string("no memory to mirror another rank: ") + std::strerror(errno));
  }
  base_ = static_cast<std::byte*>(at);
}

RemoteMembers::Memory::~Memory() { munmap(base_, bytes_); }

size_t RemoteMembers::stages_offset(int world) {
  const size_t control = sizeof(ControlBlock) + world * sizeof(std::atomic<uint64_t>);
  return (control + kPage - 1) / kPage * kPage;
}

RemoteMembers::RemoteMembers(Network& network, uint64_t job, uint64_t group,
                             const std::vector<int>& members, std::vector<bool> remote, int rank)
    : network_(network), group_(group), members_(members) {
  const int world = static_cast<int>(members.size());
  const size_t bytes = stages_offset(world) + kStages * kStageBytes;
  const auto count = static_cast<size_t>(std::count(remote.begin(), remote.end(), true));
  memory_ = std::make_unique<Memory>(kPage + count * bytes);
  std::byte* next = memory_->base() + kPage;
  rank_of_.resize(*std::max_element(members.begin(), members.end()) + 1, -1);
  for (int r = 0; r < world; ++r) {
    rank_of_[members[r]] = r;
    const bool is_mirrored = r != rank && remote[r];
    mirrors_.push_back(is_mirrored ? std::exchange(next, next + bytes) : nullptr);
    if (is_mirrored) {
      control(r).prepare(r, world, members[r], job, group);
    }
  }
  auto* header = reinterpret_cast<MirrorHeader*>(memory_->base());
  header->version = kLayoutVersion;
  header->process = getpid();
  header->first = kPage;
  header->stride = bytes;
  header->magic = kControlMagic;
  network_.add_group(group_, this);
}

RemoteMembers::~RemoteMembers() { network_.remove_group(group_); }

template <class F>
void RemoteMembers::for_each(F&& call) const {
  for (size_t r = 0; r < mirrors_.size(); ++r) {
    if (mirrors_[r] != nullptr) {
      call(members_[r]);
    }
  }
}

FrameHeader RemoteMembers::frame_of(FrameKind kind, uint64_t operation) const {
  FrameHeader frame;
  frame.kind = kind;
  frame.group = group_;
  frame.operation = operation;
  return frame;
}

void RemoteMembers::send_to_all(const FrameHeader& frame, const void* body, size_t body_bytes) {
  for_each([&](int peer) {
    network_.queue(peer, frame, body, body_bytes);
    network_.flush(peer);
  });
}

void RemoteMembers::tell_post(int r, const OperationSlot& slot, bool has_word, uint64_t bytes,
                              const std::byte* stage, size_t stage_offset, size_t stage_bytes) {
  FrameHeader frame = frame_of(FrameKind::post, slot.posted.load(std::memory_order_relaxed) - 1);
  frame.offset = stage_offset;
  frame.content = has_word ? kHasWord : 0;
  struct {
    PostBody body;
    Word word;
  } sent{{slot.fingerprint, slot.prescale, bytes}, {}};
  if (has_word) {
    sent.word = slot.word;
  }
  network_.queue(members_[r], frame, &sent, post_body_bytes(frame), stage + stage_offset,
                 stage_bytes);
  posted_bytes_.fetch_add(stage_bytes, std::memory_order_relaxed);
}

void RemoteMembers::tell_finished(uint64_t number) {
  const FrameHeader frame = frame_of(FrameKind::finished, number);
  for_each([&](int peer) { network_.queue(peer, frame); });
}

namespace {

FailureRecord body_of(const AbortRecord& record) {
  FailureRecord body = record.failure;
  body.when_ns = now_ns() - body.when_ns;
  return body;
}

}  // namespace

void RemoteMembers::tell_failure(const AbortRecord& record) {
  const FailureRecord body = body_of(record);
  send_to_all(frame_of(FrameKind::failed), &body, sizeof(body));
}

void RemoteMembers::tell_left(const AbortRecord& record) {
  if (record.state.load(std::memory_order_relaxed) == AbortRecord::why_it_left) {
    const FailureRecord body = body_of(record);
    send_to_all(frame_of(FrameKind::left), &body, sizeof(body));
  } else {
    send_to_all(frame_of(FrameKind::left));
  }
}

void RemoteMembers::tell_alive(const MessageWait& message, int64_t now) {
  const FrameHeader frame = frame_of(FrameKind::alive);
  AliveBody body;
  body.age_ns = now - message.since_ns.load(std::memory_order_relaxed);
  body.tag = message.tag.load(std::memory_order_relaxed);
  body.bytes = message.bytes.load(std::memory_order_relaxed);
  body.peer = message.peer.load(std::memory_order_relaxed);
  body.sends = message.sends.load(std::memory_order_relaxed);
  const bool waits_for_message = message.seen_ns.load(std::memory_order_relaxed) == now;
  for_each([&](int peer) {
    if (network_.has_room(peer)) {
      network_.queue(peer, frame, &body, waits_for_message ? sizeof(body) : 0);
    }
    network_.flush(peer);
  });
}

void RemoteMembers::tell_placement(const Placement& placement, int64_t now) {
  PlacementBody body;
  body.age_ns = now - placement.since_ns.load(std::memory_order_relaxed);
  body.operations = placement.operations.load(std::memory_order_relaxed);
  std::memcpy(body.text, placement.text, sizeof(body.text));
  const FrameHeader frame = frame_of(FrameKind::placement);
  for_each([&](int peer) {
    if (network_.has_room(peer)) {
      network_.queue(peer, frame, &body, sizeof(body));
    }
    network_.flush(peer);
  });
}

void RemoteMembers::tell_ballot(const Ballot& ballot) {
  send_to_all(frame_of(FrameKind::ballot), &ballot, sizeof(ballot));
}

void RemoteMembers::flush_all() {
  for_each([&](int peer) { network_.flush(peer); });
}

void RemoteMembers::take(int peer, const FrameHeader& frame, const std::byte* payload) {
  const bool is_member = peer < static_cast<int>(rank_of_.size()) && rank_of_[peer] >= 0;
  if (!is_member || !contains(rank_of_[peer])) {
    return;
  }
  const int r = rank_of_[peer];
  ControlBlock& block = control(r);
  block.alive_ns.store(now_roughly_ns(), std::memory_order_relaxed);
  switch (frame.kind) {
    case FrameKind::post:
      take_post(r, frame, payload);
      break;
    case FrameKind::finished: {
      block.record_finished(frame.operation);
      HistoryEntry& entry = block.history[frame.operation % kHistory];
      entry.end_ns.store(now_roughly_ns(), std::memory_order_release);
      break;
    }
    case FrameKind::failed:
      take_abort(r, AbortRecord::why_it_failed, payload);
      break;
    case FrameKind::left:
      if (frame.bytes > 0) {
        take_abort(r, AbortRecord::why_it_left, payload);
      }
      block.left.store(1, std::memory_order_release);
      break;
    case FrameKind::alive:
      if (frame.bytes > 0) {
        take_message_wait(r, payload);
      }
      break;
    case FrameKind::placement:
      take_placement(r, payload);
      break;
    case FrameKind::ballot: {
      Ballot ballot;
      std::memcpy(static_cast<void*>(&ballot), payload, sizeof(ballot));
      ballot.meeting[kMeetingBytes - 1] = '\0';
      block.ballots.write(ballot);
      break;
    }
    case FrameKind::data:
      break;
  }
}

void RemoteMembers::take_post(int r, const FrameHeader& frame, const std::byte* payload) {
  const uint64_t number = frame.operation;
  ControlBlock& block = control(r);
  PostBody body;
  std::memcpy(&body, payload, sizeof(body));
  const uint32_t body_bytes = post_body_bytes(frame);
  const size_t stage = stages_offset(block.world) + (number % kStages) * kStageBytes;
  std::memcpy(base(r) + stage + frame.offset, payload + body_bytes, frame.bytes - body_bytes);

  OperationSlot& slot = block.slot(number);
  if (frame.content == kHasWord) {
    std::memcpy(&slot.word, payload + sizeof(body), sizeof(slot.word));
  }
  slot.filled.store(kEverything, std::memory_order_relaxed);
  slot.input_offset = slot.output_offset = ~uint64_t{0};  // nowhere that this rank could reach
  slot.stage_offset = stage;
  slot.fingerprint = body.fingerprint;
  slot.prescale = body.prescale;

  block.record_entered(number, body.fingerprint, body.bytes, now_roughly_ns());
  slot.posted.store(number + 1, std::memory_order_release);
}

void RemoteMembers::take_abort(int r, AbortRecord::State state, const std::byte* payload) {
  AbortRecord& record = control(r).abort;
  if (record.state.load(std::memory_order_relaxed) != AbortRecord::none) {
    return;
  }
  FailureRecord body;
  std::memcpy(&body, payload, sizeof(body));
  const auto is_rank = [world = control(r).world](int who) { return who >= 0 && who < world; };
  body.culprit = is_rank(body.culprit) ? body.culprit : -1;
  body.reporter = is_rank(body.reporter) ? body.reporter : r;
  body.when_ns = now_ns() - body.when_ns;
  body.reason[sizeof(body.reason) - 1] = '\0';
  record.publish(state, body);
}

void RemoteMembers::take_message_wait(int r, const std::byte* payload) {
  AliveBody body;
  std::memcpy(&body, payload, sizeof(body));
  const int64_t now = now_ns();
  control(r).message.show(body.sends != 0, body.peer, body.tag, body.bytes, now - body.age_ns, now);
}

void RemoteMembers::take_placement(int r, const std::byte* payload) {
  PlacementBody body;
  std::memcpy(&body, payload, sizeof(body));
  body.text[sizeof(body.text) - 1] = '\0';
  const int64_t now = now_ns();
  record_placement(control(r).placement, body.text, now - body.age_ns, body.operations, now);
}

}  // namespace dpcore
