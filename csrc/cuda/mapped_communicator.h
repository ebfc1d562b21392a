// backend="cuda": ranks of one host that map each other's device memory. No NCCL, and several ranks
// may share a GPU.
//
// Every rank has a stage in device memory with a mailbox for each peer, and a page of flags on the
// host that all devices of the host can see. A message is copied into the sender's mailbox, a flag
// is raised, the receiver copies it out and raises another. Flags are numbers that only grow; the
// stream itself writes them and waits for them (stream memory operations), so no kernel ever spins:
// ranks that share a GPU take turns on it, and a kernel that waited for another rank would keep
// that rank from running.
//
// All collectives are lists of moves over these messages (stream_moves.h), the ordered algorithms
// unless another is asked for: the same schedules, and the same bits, as on the CPU.
//
// What it costs: each byte of a message is copied twice. When it loses: between GPUs with a GPU
// each NCCL moves data without the stage. It is for one GPU with several ranks, which NCCL refuses
// before 2.30.3, and for seeing every step.
//
// When a rank is gone its flags are never raised. Whoever looks after the streams (stream_watch.h)
// then raises those that this rank waits for, again and again until its stream has passed: what the
// stream carries from there on is garbage in memory of a communicator that raises at every call.
#pragma once

#include <vector>

#include "cuda/stream_communicator.h"
#include "cuda/stream_moves.h"

namespace dpcore {

class MappedCommunicator final : public StreamCommunicator, private StreamMessages {
 public:
  // The ranks of `control` meet; they have to share memory on the host. Throws Unsupported where
  // they do not, or where a device can't reach another's memory.
  static std::shared_ptr<MappedCommunicator> start(std::shared_ptr<Communicator> control,
                                                   std::shared_ptr<Device> device, Options options);
  ~MappedCommunicator() override;

  std::string backend() const override { return "cuda"; }
  std::string describe() const override { return "mapped memory of " + device_->name(); }
  // Memory needs no announcement: messages go through the stage.
  std::shared_ptr<void> register_memory(std::byte*, size_t) override { return nullptr; }
  std::shared_ptr<StreamCommunicator> split(int color, int key) override;

 private:
  struct Message {
    std::byte* data;
    size_t bytes;
    int peer;
  };
  struct Line {  // to or from one peer
    std::byte* mailbox = nullptr;
    uint32_t* sent = nullptr;   // raised by the sender's stream
    uint32_t* taken = nullptr;  // raised by the receiver's
    uint32_t number = 0;        // of pieces so far
  };

  MappedCommunicator(std::shared_ptr<Communicator> control, std::shared_ptr<Device> device,
                     Options options);
  void meet();
  void forget_peers();
  bool everybody_leaves();

  void plan(Request& request, const std::string& algorithm) override;
  void enqueue(const Request& request) override;
  void enqueue(const std::vector<StreamMessage>& messages) override;
  std::string trouble() override { return ""; }
  void stop() override;
  void release() override;

  // StreamMessages
  void begin_group() override {}
  void send(const void* data, size_t bytes, int to) override;
  void receive(void* data, size_t bytes, int from) override;
  void end_group() override;
  void send_piece(const Message& message, size_t at, size_t bytes);
  void receive_piece(const Message& message, size_t at, size_t bytes);

  std::byte* stage_ = nullptr;           // this rank's mailboxes
  std::shared_ptr<std::byte> own_page_;  // flags, in the host's arena
  std::vector<uint32_t*> pages_;         // of all ranks, as the host sees them
  std::vector<std::byte*> imported_;     // stages of peers
  std::vector<Line> outgoing_;           // by peer
  std::vector<Line> incoming_;
  std::vector<Message> sends_;  // of the group that is open
  std::vector<Message> receives_;
};

}  // namespace dpcore
