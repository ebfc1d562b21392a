// See rank_barrier.h.
#include "cuda/mapped/rank_barrier.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "comm/base/error.h"

namespace dpcore {
namespace {

// What one block of a barrier kernel is worth starting for.
constexpr size_t kBytesPerBlock = size_t{32} << 10;

class StreamBarrier final : public RankBarrier {
 public:
  using RankBarrier::RankBarrier;

  std::string name() const override { return "stream"; }
  bool can_be_captured() const override { return false; }  // numbers are given by the host

  void wait() override {
    const uint32_t number = ++number_;
    std::vector<FlagNumber> own;
    std::vector<FlagNumber> theirs;
    for (int r = 0; r < world(); ++r) {
      if (r == rank_) {
        continue;
      }
      own.push_back({&on_device(rank_).arrived[r].value, number});
      theirs.push_back({&on_device(r).arrived[rank_].value, number});
    }
    device_.raise_flags(stream_, own);
    device_.wait_flags(stream_, theirs);
  }

  void reduce(const ReduceSpec& spec, std::span<const void* const> in, std::span<void* const> out,
              size_t count, size_t, Barriers barriers) override {
    if (barriers.enters) {
      wait();
    }
    if (count > 0) {
      ShareSync sync;
      sync.given_up = &on_device(rank_).given_up.value;
      device_.reduce_together(stream_, spec, in, out, count, sync);
    }
    if (barriers.leaves) {
      wait();
    }
  }

  // Words that nobody else waits for. A peer's stream may lower one again.
  void let_pass() override {
    for (int r = 0; r < world(); ++r) {
      if (r == rank_) {
        continue;
      }
      const std::atomic_ref<uint32_t> word(page(r).arrived[rank_].value);
      const uint32_t passes = number_.load() + kReleased;
      if (word.load() != passes) {
        word.store(passes);
      }
    }
  }

 private:
  std::atomic<uint32_t> number_ = kFirstNumber;  // of barriers so far
};

class KernelBarrier final : public RankBarrier {
 public:
  KernelBarrier(Device& device, Device::Stream stream, int rank, std::vector<FlagPage*> pages,
                std::vector<FlagPage*> pages_on_device, const std::vector<SignalPad*>& pads)
      : RankBarrier(device, stream, rank, std::move(pages), std::move(pages_on_device)) {
    common_.given_up = &on_device(rank).given_up.value;
    common_.late = &on_device(rank).late.value;
    std::copy(pads.begin(), pads.end(), common_.pads);
    common_.rank = rank;
    common_.world = world();
  }

  std::string name() const override { return "fused"; }
  bool can_be_captured() const override { return true; }  // numbers are counted on the pad
  void be_patient(double seconds) override {
    common_.patience_ns = static_cast<uint64_t>(seconds * 1e9);
  }

  void wait() override {
    const void* in = common_.pads[rank_];
    void* out = common_.pads[rank_];
    reduce({.dtype = DType::u8, .op = ReduceOp::bor}, {&in, 1}, {&out, 1}, 0, 0, {true, false});
  }

  void reduce(const ReduceSpec& spec, std::span<const void* const> in, std::span<void* const> out,
              size_t count, size_t largest_bytes, Barriers barriers) override {
    ShareSync sync = common_;
    sync.enters = barriers.enters;
    sync.leaves = barriers.leaves;
    const size_t wanted = (largest_bytes + kBytesPerBlock - 1) / kBytesPerBlock;
    sync.blocks = static_cast<int>(std::clamp<size_t>(wanted, 1, kBarrierBlocks));
    device_.reduce_together(stream_, spec, in, out, count, sync);
  }

 private:
  ShareSync common_;
};

}  // namespace

void RankBarrier::give_up() { std::atomic_ref<uint32_t>(page(rank_).given_up.value).store(1); }

int RankBarrier::late_peer() const {
  return LatePeer::peer(std::atomic_ref<uint32_t>(page(rank_).late.value).load());
}

bool RankBarrier::gave_up() const {
  return std::atomic_ref<uint32_t>(page(rank_).given_up.value).load() != 0;
}

std::string choose_barrier(std::span<const std::string> uuids, const std::string& wish) {
  if (wish == "stream" || wish == "fused") {
    return wish;
  }
  if (!wish.empty() && wish != "auto") {
    throw Unsupported("DPCORE_CUDA_SYNC=" + wish + ": choose of auto, stream and fused");
  }
  const std::set<std::string> different(uuids.begin(), uuids.end());
  return different.size() == uuids.size() ? "fused" : "stream";
}

std::unique_ptr<RankBarrier> stream_barrier(Device& device, Device::Stream stream, int rank,
                                            std::vector<FlagPage*> pages,
                                            std::vector<FlagPage*> pages_on_device) {
  return std::make_unique<StreamBarrier>(device, stream, rank, std::move(pages),
                                         std::move(pages_on_device));
}

std::unique_ptr<RankBarrier> kernel_barrier(Device& device, Device::Stream stream, int rank,
                                            std::vector<FlagPage*> pages,
                                            std::vector<FlagPage*> pages_on_device,
                                            std::vector<SignalPad*> pads) {
  return std::make_unique<KernelBarrier>(device, stream, rank, std::move(pages),
                                         std::move(pages_on_device), pads);
}

}  // namespace dpcore
