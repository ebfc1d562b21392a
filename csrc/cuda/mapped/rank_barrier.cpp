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
  StreamBarrier(StreamPages at, const std::vector<SignalPad*>& pads)
      : RankBarrier(std::move(at)), answer_(&pads[static_cast<size_t>(at_.rank)]->answer) {}

  std::string name() const override { return "stream"; }
  bool can_be_captured() const override { return false; }  // numbers are given by the host

  void wait() override {
    const uint32_t number = ++number_;
    std::vector<FlagNumber> own;
    std::vector<FlagNumber> theirs;
    for (int r = 0; r < world(); ++r) {
      if (r == at_.rank) {
        continue;
      }
      own.push_back({&on_device(at_.rank).arrived[r].value, number});
      theirs.push_back({&on_device(r).arrived[at_.rank].value, number});
    }
    at_.device.raise_flags(at_.stream, own);
    at_.device.wait_flags(at_.stream, theirs);
  }

  void reduce(const ReduceSpec& spec, std::span<const void* const> in, std::span<void* const> out,
              size_t count, size_t, Barriers barriers) override {
    if (barriers.enters) {
      wait();
    }
    if (count > 0) {
      ShareSync sync;
      sync.given_up = &on_device(at_.rank).given_up.value;
      sync.answer = answer_;
      at_.device.reduce_together(at_.stream, spec, in, out, count, sync);
    }
    if (barriers.leaves) {
      wait();
    }
  }

  // Words that no other rank waits for. A peer's stream may lower one again.
  void let_pass() override {
    for (int r = 0; r < world(); ++r) {
      if (r == at_.rank) {
        continue;
      }
      const std::atomic_ref<uint32_t> word(page(r).arrived[at_.rank].value);
      const uint32_t passes = number_.load() + kReleased;
      if (word.load() != passes) {
        word.store(passes);
      }
    }
  }

 private:
  HostAnswer* answer_;
  std::atomic<uint32_t> number_ = kFirstNumber;  // of barriers so far
};

class KernelBarrier final : public RankBarrier {
 public:
  KernelBarrier(StreamPages at, const std::vector<SignalPad*>& pads) : RankBarrier(std::move(at)) {
    common_.given_up = &on_device(at_.rank).given_up.value;
    common_.late = &on_device(at_.rank).late.value;
    std::copy(pads.begin(), pads.end(), common_.pads);
    common_.answer = &common_.pads[at_.rank]->answer;
    common_.rank = at_.rank;
    common_.world = world();
  }

  std::string name() const override { return "fused"; }
  bool can_be_captured() const override { return true; }  // numbers are counted on the pad
  void be_patient(double seconds) override {
    common_.patience_ns = static_cast<uint64_t>(seconds * 1e9);
  }

  void wait() override {
    const void* in = common_.pads[at_.rank];
    void* out = common_.pads[at_.rank];
    reduce({.dtype = DType::u8, .op = ReduceOp::bor}, {&in, 1}, {&out, 1}, 0, 0, {true, false});
  }

  void reduce(const ReduceSpec& spec, std::span<const void* const> in, std::span<void* const> out,
              size_t count, size_t largest_bytes, Barriers barriers) override {
    ShareSync sync = common_;
    sync.enters = barriers.enters;
    sync.leaves = barriers.leaves;
    const size_t wanted = (largest_bytes + kBytesPerBlock - 1) / kBytesPerBlock;
    sync.blocks = static_cast<int>(std::clamp<size_t>(wanted, 1, kBarrierBlocks));
    at_.device.reduce_together(at_.stream, spec, in, out, count, sync);
  }

 private:
  ShareSync common_;
};

}  // namespace

void RankBarrier::give_up() { std::atomic_ref<uint32_t>(page(at_.rank).given_up.value).store(1); }

int RankBarrier::late_peer() const {
  return LatePeer::peer(std::atomic_ref<uint32_t>(page(at_.rank).late.value).load());
}

bool RankBarrier::gave_up() const {
  return std::atomic_ref<uint32_t>(page(at_.rank).given_up.value).load() != 0;
}

std::string choose_barrier(std::span<const std::string> uuids, const std::string& wish) {
  if (wish == "stream" || wish == "fused") {
    return wish;
  }
  if (!wish.empty() && wish != "auto") {
    throw Unsupported("DPCORE_CUDA_SYNC=" + wish + ": choose from auto, stream and fused");
  }
  const std::set<std::string> different(uuids.begin(), uuids.end());
  return different.size() == uuids.size() ? "fused" : "stream";
}

std::unique_ptr<RankBarrier> make_barrier(const std::string& name, StreamPages at,
                                          const std::vector<SignalPad*>& pads) {
  if (name == "fused") {
    return std::make_unique<KernelBarrier>(std::move(at), pads);
  }
  return std::make_unique<StreamBarrier>(std::move(at), pads);
}

}  // namespace dpcore
