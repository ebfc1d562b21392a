// The barrier of a communicator's ranks in the order of their streams, so that one may read what
// another has written: in the streams, or in the kernels themselves (share_sync.h).
//
//   stream   every rank raises a flag for each peer and waits for theirs by stream memory
//            operations; kernels are short and never wait. Ranks may share a GPU.
//   fused    a kernel waits for its counterparts before and after its work. Each rank needs its own
//            GPU: a waiting kernel keeps its GPU from the others.
//
// Memory: pages of flags and signal pads belong to the communicator. Threads: the one that holds
// the communicator's lock; give_up, let_pass and what only asks by any.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/device/device.h"
#include "cuda/mapped/flag_page.h"

namespace dpcore {

// Where the stream of a rank meets those of its peers.
struct StreamPages {
  Device& device;
  Device::Stream stream;
  int rank;
  std::vector<FlagPage*> pages;      // by rank, as the host sees them
  std::vector<FlagPage*> on_device;  // and as the device does
};

class RankBarrier {
 public:
  struct Barriers {  // a piece of work: whether others must have come before it, and behind it
    bool enters = true;
    bool leaves = true;
  };

  explicit RankBarrier(StreamPages at) : at_(std::move(at)) {}
  virtual ~RankBarrier() = default;
  virtual std::string name() const = 0;
  // Whether what it puts into the stream can run again.
  virtual bool can_be_captured() const = 0;

  // How long a kernel that comes from here on waits before it gives up, where kernels wait.
  virtual void be_patient(double) {}

  // Into the stream: behind it all that ranks have put in before is done and visible.
  virtual void wait() = 0;
  // A reduction over memory of several ranks. `largest_bytes`: of the rank that has most to do, the
  // same on all of them.
  virtual void reduce(const ReduceSpec& spec, std::span<const void* const> in,
                      std::span<void* const> out, size_t count, size_t largest_bytes,
                      Barriers barriers) = 0;

  // From here on kernels touch no peer's memory and wait for no peer.
  void give_up();
  // Lets this rank's stream pass where it waits now; again and again until it has passed.
  virtual void let_pass() {}
  // The rank for which a kernel has waited long, or -1; and whether it gave up.
  int late_peer() const;
  bool gave_up() const;

 protected:
  int world() const { return static_cast<int>(at_.pages.size()); }
  FlagPage& page(int r) const { return *at_.pages[static_cast<size_t>(r)]; }
  FlagPage& on_device(int r) const { return *at_.on_device[static_cast<size_t>(r)]; }

  StreamPages at_;
};

// "stream" or "fused": `wish` (DPCORE_CUDA_SYNC, or empty), else by whether ranks share a GPU.
// Throws Unsupported for any other wish.
std::string choose_barrier(std::span<const std::string> uuids, const std::string& wish);

// The one of this name. `pads`: of all ranks, as this device sees them; the own one is prepared.
std::unique_ptr<RankBarrier> make_barrier(const std::string& name, StreamPages at,
                                          const std::vector<SignalPad*>& pads);

}  // namespace dpcore
