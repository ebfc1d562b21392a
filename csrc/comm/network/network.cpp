// Connections, control frames, sleeping and the end. What is set aside: network_aside.cpp.
#include "comm/network/network.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "comm/base/clock.h"
#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr int kLineBits = 8;  // an event's name: peer, then connection
constexpr size_t kLongestFrame =
    sizeof(FrameHeader) +
    std::max(sizeof(PostBody) + sizeof(Word) + kMaxPostedBytes, sizeof(FailureRecord));
constexpr int kEvents = 64;
constexpr size_t kHalfSegment = TcpFlow::kSegmentBytes / 2;
constexpr size_t kLeastShare = size_t{32} << 10;
constexpr size_t kPage = 4096;
constexpr int64_t kSettleLookNs = 200'000;

// Bytes that the other side's kernel has not confirmed, on a connection that it has not ended.
uint64_t unacknowledged(int fd) {
  int bytes = 0;
  pollfd entry{fd, 0, 0};  // errors and the end show without being asked for
  const bool is_of_use = ioctl(fd, SIOCOUTQ, &bytes) == 0 && ::poll(&entry, 1, 0) == 0;
  return is_of_use ? static_cast<uint64_t>(bytes) : 0;
}

[[noreturn]] Descriptor no_descriptor() {
  throw RendezvousError(std::string("no descriptor for epoll: ") + std::strerror(errno) +
                        "; raise `ulimit -n`");
}

void sleep_ns(int64_t nanoseconds) {
  const timespec time{0, nanoseconds};
  nanosleep(&time, nullptr);
}

}  // namespace

Descriptor Network::make_wake_event() {
  Descriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE));
  return event ? std::move(event) : no_descriptor();
}

Network::Network(int rank, std::vector<TcpPeer> peers, Descriptor wake_event)
    : rank_(rank),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_event_(std::move(wake_event)),
      scratch_(std::make_unique<std::byte[]>(TcpLine::kScratchBytes)) {
  if (!epoll_) {
    no_descriptor();
  }
  for (size_t r = 0; r < peers.size(); ++r) {
    if (!peers[r].is_remote()) {
      peers_.push_back(nullptr);
      continue;
    }
    std::vector<TcpSocket>& lines = peers[r].lines;
    auto peer = std::make_unique<Peer>(std::move(lines.at(0)));
    peer->address = std::move(peers[r].address);
    peer->in.resize(2 * kLongestFrame);
    watch(peer->control.fd(), r << kLineBits);
    for (size_t i = 1; i < lines.size(); ++i) {
      peer->data.emplace_back(std::move(lines[i]));
      watch(peer->data.back().fd(), r << kLineBits | i);
    }
    peers_.push_back(std::move(peer));
  }
  share_card();
  set_longer_timeout(kLeastTimeoutNs);
}

Network::Moving::Moving(Network* network, int priority) : network_(network), priority_(priority) {
  if (network_ != nullptr) {
    network_->moving_.push_back(priority_);
  }
}

Network::Moving::~Moving() {
  if (network_ != nullptr) {
    std::vector<int>& all = network_->moving_;
    all.erase(std::find(all.begin(), all.end(), priority_));
  }
}

Precedence Network::precedence_of(int priority) const {
  if (!has_priorities_) {
    return Precedence::none;
  }
  const bool is_first =
      std::all_of(moving_.begin(), moving_.end(), [&](int other) { return other <= priority; });
  return is_first ? Precedence::first : Precedence::overtaken;
}

bool Network::overtakes(int priority) const {
  return precedence_of(priority) == Precedence::first &&
         std::any_of(moving_.begin(), moving_.end(), [&](int other) { return other < priority; });
}

// What the kernel has taken leaves before anything more urgent, and so does the rest of a frame
// that has begun: together one segment of 256 KiB, which all connections share, as long as that
// leaves each of them enough to keep the NIC busy until this rank polls again. Where polls are late
// a connection gets more, up to its peer's share of a segment.
void Network::share_card() {
  size_t lines = 0;
  size_t peers = 0;
  for (const auto& peer : peers_) {
    lines += peer ? peer->data.size() : 0;
    peers += peer ? 1 : 0;
  }
  const size_t share = kHalfSegment / std::max<size_t>(lines, 1) / kPage * kPage;
  frame_bytes_ = std::max(share, kLeastShare);
  for (const auto& peer : peers_) {
    if (peer) {
      for (TcpLine& line : peer->data) {
        line.share(frame_bytes_, TcpFlow::kSegmentBytes / peers);
      }
    }
  }
}

void Network::set_longer_timeout(int64_t nanoseconds) {
  const std::lock_guard<SpinLock> hold(timeout_lock_);
  if (nanoseconds <= timeout_ns_.load(std::memory_order_relaxed)) {
    return;
  }
  timeout_ns_.store(nanoseconds, std::memory_order_relaxed);
  for (const auto& peer : peers_) {
    if (peer) {
      TcpSocket::set_timeout(peer->control.fd(), nanoseconds);
      for (const TcpLine& line : peer->data) {
        TcpSocket::set_timeout(line.fd(), nanoseconds);
      }
    }
  }
}

void Network::watch(int fd, uint64_t name) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = name;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw RendezvousError(
        std::string("cannot watch a connection to another rank: epoll_ctl failed with \"") +
        std::strerror(errno) +
        "\". The kernel allows a user as many as /proc/sys/fs/epoll/max_user_watches says");
  }
}

void Network::add_group(uint64_t group, Target* target) {
  const std::lock_guard<SpinLock> hold(groups_lock_);
  groups_.emplace_back(group, target);
}

void Network::remove_group(uint64_t group) {
  if (origin_.is_forked_copy()) {
    return;
  }
  const std::lock_guard<SpinLock> hold(groups_lock_);
  std::erase_if(groups_, [&](const auto& entry) { return entry.first == group; });
  groups_closed_.store(true, std::memory_order_release);
}

void Network::queue(int to, FrameHeader header, const void* body, size_t body_bytes,
                    const std::byte* data, size_t data_bytes) {
  Peer& peer = *peers_[to];
  header.bytes = static_cast<uint32_t>(body_bytes + data_bytes);
  const std::lock_guard<SpinLock> hold(peer.lock);
  const auto append = [&](const void* from, size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(from);
    peer.out.insert(peer.out.end(), begin, begin + bytes);
  };
  append(&header, sizeof(header));
  append(body, body_bytes);
  append(data, data_bytes);
}

void Network::flush(int to) {
  Peer& peer = *peers_[to];
  const std::lock_guard<SpinLock> hold(peer.lock);
  send_queued(peer);
}

bool Network::has_room(int to) const {
  Peer& peer = *peers_[to];
  const std::lock_guard<SpinLock> hold(peer.lock);
  return peer.out.empty();
}

// A connection that is broken shows it where it is read: here the frames are just dropped.
void Network::send_queued(Peer& peer) {
  while (peer.out_sent < peer.out.size()) {
    const ssize_t sent = send(peer.control.fd(), peer.out.data() + peer.out_sent,
                              peer.out.size() - peer.out_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (peer.out_sent > peer.out.size() / 2) {  // what was sent goes, also where more never ends
        peer.out.erase(peer.out.begin(), peer.out.begin() + static_cast<ptrdiff_t>(peer.out_sent));
        peer.out_sent = 0;
      }
      return;
    }
    if (sent < 0 && errno != EINTR) {
      break;
    }
    peer.out_sent += sent > 0 ? static_cast<size_t>(sent) : 0;
  }
  peer.out.clear();
  peer.out_sent = 0;
}

void Network::poll() {
  changes_.begin_poll();
  epoll_event events[kEvents];
  int count = 0;
  do {
    count = epoll_wait(epoll_.get(), events, kEvents, 0);
    for (int i = 0; i < count; ++i) {
      const uint64_t name = events[i].data.u64;
      const uint32_t what = events[i].events;
      const auto peer_rank = static_cast<int>(name >> kLineBits);
      Peer& peer = *peers_[peer_rank];
      const size_t line = name & ((1u << kLineBits) - 1);
      const bool ends = (what & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
      const bool in = ends || (what & EPOLLIN) != 0;
      const bool out = (what & EPOLLOUT) != 0;
      if (line > 0) {
        peer.data[line - 1].readable |= in;
        peer.data[line - 1].writable |= out;
        peer.data[line - 1].flush();
        changes_.record();
        continue;
      }
      if (out) {
        flush(peer_rank);
      }
      if (in) {
        read_control(peer_rank, ends);
      }
    }
  } while (count == kEvents);
}

// Less than there is room for is all there was: what comes later is another event. Only where the
// connection `ends` is the end asked for, since it has been announced.
void Network::read_control(int from, bool ends) {
  Peer& peer = *peers_[from];
  while (!peer.lost.load(std::memory_order_relaxed)) {
    const size_t room = peer.in.size() - peer.in_bytes;
    const ssize_t received =
        recv(peer.control.fd(), peer.in.data() + peer.in_bytes, room, MSG_DONTWAIT);
    if (received > 0) {
      peer.in_bytes += static_cast<size_t>(received);
      if (!parse_control(from)) {
        lose(from, "it sent something that is not a frame");
      }
      if (!ends && static_cast<size_t>(received) < room) {
        return;
      }
    } else if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else if (received == 0) {
      peer.closed_there = true;
      lose(from, "its connection was closed");
    } else if (errno != EINTR) {
      peer.closed_there = errno == ECONNRESET;
      lose(from, std::string("its connection broke: ") + std::strerror(errno));
    }
  }
}

// Hands out all complete frames; what is left of the last one moves to the front.
bool Network::parse_control(int from) {
  Peer& peer = *peers_[from];
  size_t at = 0;
  while (peer.in_bytes - at >= sizeof(FrameHeader)) {
    FrameHeader frame;
    std::memcpy(&frame, peer.in.data() + at, sizeof(frame));
    if (!is_plausible(frame) || frame.kind == FrameKind::data) {
      return false;
    }
    if (peer.in_bytes - at < sizeof(frame) + frame.bytes) {
      break;
    }
    {
      const std::lock_guard<SpinLock> hold(groups_lock_);
      for (const auto& [group, target] : groups_) {
        if (group == frame.group) {
          target->take(from, frame, peer.in.data() + at + sizeof(frame));
        }
      }
    }
    at += sizeof(frame) + frame.bytes;
  }
  std::memmove(peer.in.data(), peer.in.data() + at, peer.in_bytes - at);
  peer.in_bytes -= at;
  return true;
}

void Network::lose(int peer, const std::string& problem) {
  peers_[peer]->problem = problem;
  peers_[peer]->lost.store(true, std::memory_order_release);
}

void Network::look_for_broken_lines() {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    if (!peers_[r] || is_lost(r)) {
      continue;
    }
    for (const TcpLine& line : peers_[r]->data) {
      if (!line.problem().empty()) {
        read_control(r, true);
        if (!is_lost(r)) {
          lose(r, "a connection for data: " + line.problem());
        }
        break;
      }
    }
  }
}

void Network::sleep(int64_t nanoseconds) {
  pollfd entries[2] = {{epoll_.get(), POLLIN, 0}, {wake_event_.get(), POLLIN, 0}};
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  if (ppoll(entries, 2, &limit, nullptr) > 0 && entries[1].revents != 0) {
    uint64_t token = 0;
    (void)!read(wake_event_.get(), &token, sizeof(token));
  }
}

void Network::wake(int wake_event, uint32_t sleepers) {
  const uint64_t tokens = sleepers;
  if (tokens > 0) {
    (void)!write(wake_event, &tokens, sizeof(tokens));
  }
}

void Network::deliver_data(int peer, int64_t deadline_ns, const std::function<bool()>& is_wanted,
                           const TakeIn& take_in) {
  for (const TcpLine& line : peers_[peer]->data) {
    const uint64_t until = line.taken();
    // What other communicators send meanwhile is not waited for. Asked in this order, the confirmed
    // part may only be thought smaller than it is.
    const auto is_confirmed = [&] {
      const uint64_t taken = line.taken();
      return unacknowledged(line.fd()) <= taken - until;
    };
    while (!is_confirmed() && !is_lost(peer) && is_wanted() && now_ns() < deadline_ns) {
      take_in();
      sleep_ns(kSettleLookNs);
    }
  }
}

void Network::settle(int64_t deadline_ns, const TakeIn& take_in) {
  for (const auto& peer : peers_) {
    if (!peer) {
      continue;
    }
    const auto is_on_its_way = [&] {
      const std::lock_guard<SpinLock> hold(peer->lock);
      send_queued(*peer);
      bool waits = !peer->out.empty() || unacknowledged(peer->control.fd()) > 0;
      for (const TcpLine& line : peer->data) {
        waits |= unacknowledged(line.fd()) > 0;
      }
      return waits;
    };
    while (is_on_its_way() && now_ns() < deadline_ns) {
      take_in();
      sleep_ns(kSettleLookNs);
    }
  }
}

// ---- data frames that no operation asks for: set aside when they stand in the way of others.
// Collectives send data only after every rank has entered, so these are messages whose receive has
// not been called yet, and segments that are ahead of this rank's window.

bool Network::is_wanted(uint64_t group) {
  const std::lock_guard<SpinLock> hold(groups_lock_);
  for (const auto& [number, target] : groups_) {
    if (number == group) {
      return target->wants_data();
    }
  }
  return false;
}

void Network::forget_closed_groups() {
  for (const auto& peer : peers_) {
    if (!peer) {
      continue;
    }
    std::erase_if(peer->aside, [&](const auto& entry) {
      const bool goes = !is_wanted(entry.first.first);
      for (const Fragment& fragment : entry.second) {
        peer->aside_bytes -= goes ? fragment.bytes.size() : 0;
      }
      return goes;
    });
  }
}

bool Network::set_aside_unexpected(bool is_needed) {
  if (groups_closed_.exchange(false, std::memory_order_acq_rel)) {
    forget_closed_groups();
  }
  bool moved = false;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    if (peers_[r]) {
      for (TcpLine& line : peers_[r]->data) {
        while (set_aside(r, line, is_needed)) {
          moved = true;
        }
      }
    }
  }
  if (moved) {
    changes_.record();
  }
  return moved;
}

// One frame, or what has come of it. A frame that an operation has begun to take is left to it.
bool Network::set_aside(int from, TcpLine& line, bool is_needed) {
  Peer& peer = *peers_[from];
  const FrameHeader* head = line.head();
  if (head == nullptr || line.claimed) {
    return false;
  }
  const FrameHeader frame = *head;  // the line forgets it with its last byte
  if (!line.aside) {
    const bool wanted = is_wanted(frame.group);
    if (wanted && !is_needed && peer.aside_bytes + frame.bytes > kMaxAsideBytes) {
      return false;
    }
    line.aside = true;
    line.kept.resize(wanted ? frame.bytes : 0);
    peer.aside_bytes += line.kept.size();
  }
  auto keep = [&](const std::byte* data, size_t offset, size_t bytes) {
    if (!line.kept.empty()) {
      std::memcpy(line.kept.data() + (offset - frame.offset), data, bytes);
    }
  };
  const bool moved = line.receive(Sink(keep), scratch_.get()) > 0;
  if (!line.aside && !line.kept.empty()) {  // it is complete
    peer.aside[{frame.group, {frame.operation, frame.part}}].push_back(
        {frame.total, frame.content, frame.offset, std::move(line.kept)});
    line.kept.clear();
  }
  return moved;
}

size_t Network::take_aside(int from, int named, uint64_t group, const Message& message, size_t have,
                           const Sink& sink) {
  Peer& peer = *peers_[from];
  const auto found = peer.aside.find({group, message.tag});
  if (found == peer.aside.end()) {
    return have;
  }
  // A later message may bear the same tag: only what belongs to this one goes.
  std::vector<Fragment>& fragments = found->second;
  size_t used = 0;
  while (used < fragments.size() && have < message.total) {
    const Fragment& fragment = fragments[used++];
    check_content(named, message, fragment.total, fragment.content);
    if (sink.destination() != nullptr) {
      std::memcpy(sink.destination() + fragment.offset, fragment.bytes.data(),
                  fragment.bytes.size());
    } else {
      sink(fragment.bytes.data(), fragment.offset, fragment.bytes.size());
    }
    have += fragment.bytes.size();
    peer.aside_bytes -= fragment.bytes.size();
  }
  fragments.erase(fragments.begin(), fragments.begin() + static_cast<ptrdiff_t>(used));
  if (fragments.empty()) {
    peer.aside.erase(found);
  }
  return have;
}

}  // namespace dpcore
