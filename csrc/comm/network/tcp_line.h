// One connection for data: a frame going out and a frame coming in, each resumable.
//
// Outgoing: a frame's header and payload go to the kernel straight from the caller's memory, as
// far as there is room; the same caller comes back for the rest, and no other frame can start
// before. If the caller has to give up, detach() copies what is left, while it is still there.
// Incoming: head() shows the frame whose payload comes next; receive() hands its bytes out, in
// place when the taker says where they belong, else through memory of the caller.
//
// readable and writable are what epoll said and no call has disproved since (edge-triggered).
// Used under the engine's progress lock only, but for taken().
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "comm/network/message.h"
#include "comm/network/tcp_flow.h"
#include "comm/network/tcp_frame.h"
#include "comm/network/tcp_socket.h"

namespace dpcore {

class TcpLine {
 public:
  explicit TcpLine(TcpSocket socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.fd(); }
  void share(size_t unsent, size_t most);
  // Why the connection is of no use any more; empty while it is.
  const std::string& problem() const { return problem_; }

  // ---- outgoing ----
  bool can_start() const { return writable && !is_sending_ && problem_.empty(); }
  // Whether little enough is on its way for a frame of this priority; if not, ask at free_ns().
  bool has_room(int priority, Precedence precedence, int64_t now);
  int64_t free_ns() const { return flow_.free_ns(); }
  bool can_resume() const { return writable && problem_.empty(); }
  bool is_sending(uint64_t group, const MessageTag& tag) const;
  bool is_sending(uint64_t group) const { return is_sending_ && outgoing_.group == group; }
  // Both return how many bytes of the payload the kernel took; start() nothing at all or a frame
  // that is_sending() until it is complete. They throw Error where the payload is no memory of this
  // process any more; receive() does so for the place that the sink names.
  size_t start(const FrameHeader& header, const std::byte* payload);
  size_t resume(const std::byte* rest);
  // The caller gives up: copies the rest of the frame, which flush() will send.
  void detach();
  void flush();
  // Bytes that the kernel has taken, ever. To be asked by any thread.
  uint64_t taken() const {
    return std::atomic_ref<uint64_t>(taken_).load(std::memory_order_relaxed);
  }

  // ---- incoming ----
  // The frame that is being received, or nullptr when its header is not there yet.
  const FrameHeader* head();
  // Gives payload to the sink; returns the number of bytes. `scratch` holds kScratchBytes.
  size_t receive(const Sink& sink, std::byte* scratch);

  static constexpr size_t kScratchBytes = size_t{128} << 10;

  bool readable = true;
  bool writable = true;
  bool claimed = false;         // an operation takes the incoming frame
  bool aside = false;           // it is being set aside, or thrown away
  std::vector<std::byte> kept;  // what has come of a frame that is being set aside

 private:
  static constexpr size_t kWholeElements = 64;  // a multiple of every element's size

  size_t send_some(const std::byte* payload, size_t bytes);
  void check_payload() const;
  ptrdiff_t read(std::byte* to, size_t bytes);
  void end_of_incoming();

  TcpSocket socket_;
  TcpFlow flow_;
  TcpLoad load_;
  std::string problem_;
  FrameHeader outgoing_;
  bool is_sending_ = false;
  bool is_payload_gone_ = false;  // the caller's memory: the rest goes as zeros
  size_t header_sent_ = 0;
  size_t payload_sent_ = 0;
  const std::byte* rest_ = nullptr;  // of the payload
  mutable uint64_t taken_ = 0;       // one writer: the lock's holder
  std::vector<std::byte> detached_;
  FrameHeader incoming_;
  size_t header_received_ = 0;
  size_t received_ = 0;  // of the payload, as the sink counts it
  size_t odd_bytes_ = 0;
  std::byte odd_[kWholeElements];  // received, but no whole element yet
};

}  // namespace dpcore
