// backend="cuda": ranks of one host that map each other's device memory. No NCCL, and several ranks
// may share a GPU.
//
// All-reduce, reduce-scatter, all-gather and broadcast read and write the mapped memory of all
// ranks (push_collectives.h): tensors of allocate_shared() where they are, others through a stage.
// Ranks wait for each other in their streams or in the kernels themselves (rank_barrier.h): the
// latter where every rank has a GPU of its own.
//
// Everything else, and every algorithm that is asked for as moves, is a list of moves over messages
// (stream_moves.h, mailboxes.h).
//
// By default all algorithms are ordered: the same schedules, and the same bits, as on the CPU.
//
// Memory: stage, mailboxes and signal pad are one region of the arena (shared_regions.h), which
// lives as long as any rank has it mapped. The page of flags lies in the host's arena, and outlives
// the communicator when peers may still write to it.
//
// When a rank is gone its flags are never raised. The thread that notices forbids further access to
// peers' memory and raises the flags that this rank waits for (let_pass), and the thread that
// looks after the stream (stream_watch.h) does so again and again until it has passed: what it
// copies from there on is garbage in memory of a communicator that raises at every call, and
// nothing is written to others. None of it waits for a thread that is in a call: that may be
// waiting for room in the stream's queue, which there is when the stream passes.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <vector>

#include "cuda/mapped/mailboxes.h"
#include "cuda/mapped/push_collectives.h"
#include "cuda/stream/stream_communicator.h"

namespace dpcore {

class MappedCommunicator final : public StreamCommunicator {
 public:
  // The ranks of `control` meet; they have to share memory on the host. Throws Unsupported where
  // they do not, or where a device can't reach another's memory.
  static std::shared_ptr<MappedCommunicator> start(std::shared_ptr<Communicator> control,
                                                   std::shared_ptr<Device> device, Options options);
  ~MappedCommunicator() override;

  std::string backend() const override { return "cuda"; }
  // "mapped memory (descriptor) of cuda:0, barrier: fused"
  std::string describe() const override;
  std::map<std::string, uint64_t> paths() override;
  std::shared_ptr<std::byte> allocate_shared(size_t bytes) override;
  // Memory of elsewhere needs no announcement: it goes through the stage.
  std::shared_ptr<void> register_memory(std::byte*, size_t) override { return nullptr; }
  std::shared_ptr<StreamCommunicator> split(int color, int key) override;

 private:
  // Of pages, for a communicator and all that are split from it: to end one waits for the device,
  // which is for the time when none of them is there any more.
  struct Registrations {
    std::mutex mutex;
    std::vector<std::shared_ptr<void>> list;
  };

  static std::shared_ptr<MappedCommunicator> start(std::shared_ptr<Communicator> control,
                                                   std::shared_ptr<Device> device, Options options,
                                                   std::shared_ptr<Registrations> registered);
  MappedCommunicator(std::shared_ptr<Communicator> control, std::shared_ptr<Device> device,
                     Options options);
  void meet();
  void map_pages(const std::vector<uint64_t>& offsets);
  void keep_registered(std::shared_ptr<void> pages);
  void open(const std::string& barrier);
  std::string agree_on_barrier();
  bool all_peers_leave();

  void plan(Request& request, const std::string& algorithm) override;
  void check_captured(const Request& request) const;
  void enqueue(const Request& request) override;
  const char* path_of(const Request& request) const override;
  void enqueue(const std::vector<StreamMessage>& messages) override;
  StreamWatch::Trouble trouble() override;
  int late_peer() const override;
  void let_pass() override;
  bool lets_pass() const override { return true; }
  void stop() override;
  void release() override;

  std::unique_ptr<SharedRegions> regions_;
  std::shared_ptr<const SharedRegion> own_region_;  // mailboxes, pad, stages
  std::shared_ptr<std::byte> own_page_;             // in the host's arena
  StreamPages pages_{*device_, stream_, rank(), {}, {}};
  std::shared_ptr<Registrations> registered_;
  std::unique_ptr<RankBarrier> barrier_;
  std::unique_ptr<Mailboxes> mailboxes_;
  std::unique_ptr<PushCollectives> pushes_;
  std::array<uint64_t, kPushPaths> runs_{};  // by path
  PushPlan planned_;                         // of the call that is being made
  std::atomic<bool> is_open_{false};         // the ranks have met: all of the above is there
  std::atomic<bool> has_passed_{true};       // the stream, when nothing more is put into it
};

}  // namespace dpcore
