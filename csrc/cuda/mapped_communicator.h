// backend="cuda": ranks of one host that map each other's device memory. No NCCL, and several ranks
// may share a GPU.
//
// All-reduce, reduce-scatter, all-gather and broadcast read and write the mapped memory of all
// ranks (push_collectives.h): tensors of allocate_shared() where they are, others through a stage.
// The ranks meet by their streams or by the kernels themselves (rank_meeting.h): the latter where
// every rank has a GPU of its own.
//
// Everything else, and every algorithm that is asked for as moves, is a list of moves over messages
// (stream_moves.h). Every rank has a mailbox for each peer in device memory. A message is copied
// into the sender's mailbox, a flag is raised, the receiver copies it out and raises another. Flags
// are numbers that only grow; the stream itself writes them and waits for them, so no kernel spins.
//
// By default all algorithms are ordered: the same schedules, and the same bits, as on the CPU.
//
// Memory: stage, mailboxes and board are one region of the arena (shared_regions.h), the page of
// flags lies in the host's arena. Both outlive the communicator when it failed, since peers may
// still write to them.
//
// When a rank is gone its flags are never raised. Whoever looks after the streams (stream_watch.h)
// then says that nothing may be touched any more and raises those that this rank waits for, again
// and again until its stream has passed: what it copies from there on is garbage in memory of a
// communicator that raises at every call, and nothing is written to others.
#pragma once

#include <array>
#include <map>
#include <vector>

#include "cuda/push_collectives.h"
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
  // "mapped memory (descriptor) of cuda:0, meetings: fused"
  std::string describe() const override;
  std::map<std::string, uint64_t> paths() override;
  std::shared_ptr<std::byte> allocate_shared(size_t bytes) override;
  // Memory of elsewhere needs no announcement: it goes through the stage.
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
    uint32_t* sent = nullptr;        // raised by the sender's stream
    uint32_t* taken = nullptr;       // raised by the receiver's
    uint32_t number = kFirstNumber;  // of pieces so far
  };

  MappedCommunicator(std::shared_ptr<Communicator> control, std::shared_ptr<Device> device,
                     Options options);
  void meet();
  void open_lines();
  void open_stages(const std::string& meeting);
  std::string agree_on_meeting();
  bool everybody_leaves();

  void plan(Request& request, const std::string& algorithm) override;
  void check_captured(const Request& request) const;
  void enqueue(const Request& request) override;
  void enqueue(const std::vector<StreamMessage>& messages) override;
  StreamWatch::Trouble trouble() override;
  int late_peer() const override;
  void stop() override;
  void release() override;

  // StreamMessages
  void begin_group() override {}
  void send(const void* data, size_t bytes, int to) override;
  void receive(void* data, size_t bytes, int from) override;
  void end_group() override;
  void send_piece(const Message& message, size_t at, size_t bytes);
  void receive_piece(const Message& message, size_t at, size_t bytes);

  std::unique_ptr<SharedRegions> regions_;
  std::shared_ptr<const SharedRegion> own_region_;  // mailboxes, board, stages
  std::shared_ptr<std::byte> own_page_;             // in the host's arena
  std::vector<FlagPage*> pages_;                    // of all ranks, as the host sees them
  std::vector<FlagPage*> on_device_;                // and as the device does
  std::unique_ptr<RankMeeting> meeting_;
  std::unique_ptr<PushCollectives> pushes_;
  std::array<uint64_t, kPushPaths> runs_{};  // by path
  PushPlan planned_;                         // of the call that is being made
  std::vector<Line> outgoing_;               // by peer
  std::vector<Line> incoming_;
  std::vector<Message> sends_;  // of the group that is open
  std::vector<Message> receives_;
};

}  // namespace dpcore
