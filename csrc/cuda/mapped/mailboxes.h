// Messages between ranks over mapped device memory, in the order of their streams.
//
// Every rank has a mailbox for each peer in device memory. A message is copied into the sender's
// mailbox, a flag is raised, the receiver copies it out and raises another. Flags are numbers that
// only grow; the stream itself writes them and waits for them, so no kernel spins.
//
// Memory: mailboxes and flags belong to the communicator; nothing is owned here. Threads: the one
// that holds the communicator's lock puts messages into the stream; numbers are atomic for
// let_pass(), which any thread may call.
#pragma once

#include <atomic>
#include <vector>

#include "cuda/mapped/rank_barrier.h"
#include "cuda/stream/stream_moves.h"

namespace dpcore {

class Mailboxes final : public StreamMessages {
 public:
  static constexpr size_t kBytes = size_t{4} << 20;  // of one, for each pair of ranks

  // `boxes`: of all ranks, as this device sees them, a mailbox for each peer in a row.
  Mailboxes(StreamPages at, const std::vector<std::byte*>& boxes);

  void begin_group() override {}
  void send(const void* data, size_t bytes, int to) override;
  void receive(void* data, size_t bytes, int from) override;
  void end_group() override;

  // Whether the peer's stream has taken all that was sent to it.
  bool is_taken_by(int peer) const;
  // Raises the flags that this rank's stream waits for; it is the only one to wait for them.
  void let_pass();

 private:
  struct Message {
    std::byte* data;
    size_t bytes;
    int peer;
  };
  struct Line {  // to or from one peer
    std::byte* mailbox = nullptr;
    uint32_t* sent = nullptr;                     // raised by the sender's stream
    uint32_t* taken = nullptr;                    // raised by the receiver's
    std::atomic<uint32_t> number = kFirstNumber;  // of fragments so far
  };

  void send_fragment(const Message& message, size_t at, size_t bytes);
  void receive_fragment(const Message& message, size_t at, size_t bytes);

  StreamPages at_;
  std::vector<Line> outgoing_;  // by peer
  std::vector<Line> incoming_;
  std::vector<Message> sends_;  // of the group that is open
  std::vector<Message> receives_;
};

}  // namespace dpcore
