// A call that the kernel answers with less than was asked for shows that there is no more: the
// next edge of epoll will say when to try again.
#include "comm/network/tcp_line.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/base/error.h"

namespace dpcore {
namespace {

// The kernel says EFAULT. Nothing is wrong with the connection, nor with the rank at its other end.
[[noreturn]] void raise_gone(const char* what) {
  throw Error(std::string("the memory that this rank ") + what +
              " was freed, unmapped or resized while the operation was in flight; keep it as it is "
              "until wait() returns");
}

}  // namespace

void TcpLine::share(size_t unsent, size_t most) {
  flow_.share(unsent, most);
  TcpSocket::limit_unsent(fd(), unsent);
}

bool TcpLine::has_room(int priority, Precedence precedence, int64_t now) {
  if (flow_.is_refused(priority, now)) {
    return false;
  }
  const size_t told = flow_.unsent();
  load_.ask(fd(), precedence != Precedence::none, now);
  const bool has_room = flow_.has_room(load_, priority, precedence, now);
  if (flow_.unsent() != told) {
    TcpSocket::limit_unsent(fd(), flow_.unsent());
  }
  return has_room;
}

bool TcpLine::is_sending(uint64_t group, const MessageTag& tag) const {
  return is_sending(group) && outgoing_.operation == tag.operation && outgoing_.part == tag.part &&
         detached_.empty();
}

size_t TcpLine::start(const FrameHeader& header, const std::byte* payload) {
  outgoing_ = header;
  header_sent_ = payload_sent_ = 0;
  is_payload_gone_ = false;
  const size_t taken = send_some(payload, header.bytes);
  is_sending_ = header_sent_ > 0 && payload_sent_ < header.bytes;
  check_payload();
  return taken;
}

size_t TcpLine::resume(const std::byte* rest) {
  const size_t taken = send_some(rest, outgoing_.bytes - payload_sent_);
  is_sending_ = payload_sent_ < outgoing_.bytes;
  check_payload();
  return taken;
}

void TcpLine::check_payload() const {
  if (is_payload_gone_) {
    raise_gone("sends");
  }
}

void TcpLine::detach() {
  const size_t left = outgoing_.bytes - payload_sent_;
  if (!detached_.empty()) {
    return;
  }
  if (is_payload_gone_) {
    detached_.assign(left, std::byte{0});
    is_payload_gone_ = false;
  } else {
    detached_.assign(rest_, rest_ + left);
  }
}

void TcpLine::flush() {
  if (!detached_.empty() && writable) {
    const size_t left = outgoing_.bytes - payload_sent_;
    resume(detached_.data() + (detached_.size() - left));
    if (!is_sending_) {
      detached_.clear();
    }
  }
}

size_t TcpLine::send_some(const std::byte* payload, size_t bytes) {
  size_t taken = 0;
  while (writable && problem_.empty() && !is_payload_gone_ && taken < bytes) {
    iovec pieces[2] = {
        {reinterpret_cast<std::byte*>(&outgoing_) + header_sent_, sizeof(outgoing_) - header_sent_},
        {const_cast<std::byte*>(payload) + taken, bytes - taken}};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    const ssize_t sent = sendmsg(socket_.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        writable = false;
      } else if (errno == EFAULT) {
        is_payload_gone_ = true;
      } else if (errno != EINTR) {
        problem_ = std::strerror(errno);
      }
      continue;
    }
    std::atomic_ref<uint64_t>(taken_).store(taken_ + static_cast<uint64_t>(sent),
                                            std::memory_order_relaxed);
    const size_t of_header = std::min(static_cast<size_t>(sent), pieces[0].iov_len);
    header_sent_ += of_header;
    taken += static_cast<size_t>(sent) - of_header;
  }
  payload_sent_ += taken;
  rest_ = payload + taken;
  return taken;
}

ptrdiff_t TcpLine::read(std::byte* to, size_t bytes) {
  while (problem_.empty()) {
    const ssize_t received = recv(socket_.fd(), to, bytes, MSG_DONTWAIT);
    if (received > 0) {
      return received;
    }
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      break;
    }
    if (received < 0 && errno == EFAULT) {
      raise_gone("receives into");
    }
    if (received == 0 || errno != EINTR) {
      problem_ = received == 0 ? "closed by the other side" : std::strerror(errno);
    }
  }
  readable = false;
  return 0;
}

const FrameHeader* TcpLine::head() {
  while (header_received_ < sizeof(incoming_)) {
    if (!readable) {
      return nullptr;
    }
    header_received_ +=
        static_cast<size_t>(read(reinterpret_cast<std::byte*>(&incoming_) + header_received_,
                                 sizeof(incoming_) - header_received_));
    if (header_received_ == sizeof(incoming_) &&
        (!is_plausible(incoming_) || incoming_.kind != FrameKind::data)) {
      problem_ = "what came is not a frame";
      header_received_ = 0;
      readable = false;
    }
  }
  return &incoming_;
}

size_t TcpLine::receive(const Sink& sink, std::byte* scratch) {
  const size_t before = received_;
  while (readable && received_ < incoming_.bytes) {
    const size_t left = incoming_.bytes - received_;
    const size_t at = incoming_.offset + received_;
    if (std::byte* destination = sink.destination()) {
      received_ += static_cast<size_t>(read(destination + at, left));
      continue;
    }
    // Whole elements only: what is left over waits for the rest of its element.
    std::memcpy(scratch, odd_, odd_bytes_);
    const size_t most = std::min(kScratchBytes, left) - odd_bytes_;
    const size_t have = odd_bytes_ + static_cast<size_t>(read(scratch + odd_bytes_, most));
    const size_t whole = have == left ? have : have / kWholeElements * kWholeElements;
    odd_bytes_ = have - whole;
    std::memcpy(odd_, scratch + whole, odd_bytes_);
    if (whole > 0) {
      sink(scratch, at, whole);
      received_ += whole;
    }
  }
  const size_t taken = received_ - before;
  if (received_ == incoming_.bytes) {
    end_of_incoming();
  }
  return taken;
}

void TcpLine::end_of_incoming() {
  header_received_ = 0;
  received_ = 0;
  odd_bytes_ = 0;
  claimed = false;
  aside = false;
}

}  // namespace dpcore
