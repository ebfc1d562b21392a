// See reduce_job.h.
#include "cuda/kernels/reduce_job.h"

#include <algorithm>
#include <string>

#include "comm/base/error.h"
#include "cuda/kernels/reduce_table.h"

namespace dpcore {
namespace {

void check(const ReduceSpec& spec, size_t n_in, size_t n_out) {
  const std::string type(name_of(spec.dtype));
  if (!is_valid(spec.op, spec.dtype)) {
    throw Unsupported(std::string(name_of(spec.op)) + " of " + type + " has no meaning");
  }
  if (n_in == 0 || n_out == 0 || n_in > kMaxOperands || n_out > kMaxOperands) {
    throw Unsupported("a reduction on a device takes 1 to " + std::to_string(kMaxOperands) +
                      " inputs and outputs, not " + std::to_string(n_in) + " and " +
                      std::to_string(n_out) + ": use a ring or a tree for so many ranks");
  }
  if ((spec.pre != nullptr || spec.post != 1.0) && !takes_factors(spec.dtype)) {
    throw Unsupported("factors need a floating-point type, not " + type);
  }
  if (spec.divisor != 1 && (takes_factors(spec.dtype) || spec.dtype == DType::boolean)) {
    throw Unsupported("a divisor needs a type of integers, not " + type);
  }
}

size_t offset_in_pack(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kPackBytes;
}

// Cuts the array where all operands reach the boundary of a pack together, if they do.
void cut(ReduceShares& shares, size_t element) {
  const size_t offset = offset_in_pack(shares.in[0]);
  const auto alike = [offset](const void* p) { return offset_in_pack(p) == offset; };
  const size_t to_boundary = (kPackBytes - offset) % kPackBytes;
  if (to_boundary % element != 0 || !std::all_of(shares.in, shares.in + shares.n_in, alike) ||
      !std::all_of(shares.out, shares.out + shares.n_out, alike)) {
    return;
  }
  shares.head = std::min(shares.count, to_boundary / element);
  shares.packs = (shares.count - shares.head) * element / kPackBytes;
}

struct OnHost {
  using Function = void (*)(const ReduceShares&, size_t worker, size_t workers);
  template <class Reducer>
  static constexpr Function make() {
    return &Reducer::run;
  }
};

// One block of one worker.
template <class Policy>
struct OnHostTogether {
  using Function = void (*)(const ReduceShares&, const ShareSync&, element::LoneBlock&);
  template <class Reducer>
  static constexpr Function make() {
    return &element::run_share<Reducer, Policy, element::LoneBlock>;
  }
};

template <class Policy>
void run_blocks(const DeviceReduction& job, const ShareSync& sync) {
  using Make = OnHostTogether<Policy>;
  static constexpr ReduceTable<typename Make::Function, Make> kTable;
  const auto run = kTable.find(job.kernel.dtype, job.kernel.op);
  for (int index = 0; index < sync.blocks; ++index) {
    element::LoneBlock block(index, sync.blocks);
    run(job.shares, sync, block);
  }
}

}  // namespace

DeviceReduction reduce_job(const ReduceSpec& spec, std::span<const void* const> in,
                           std::span<void* const> out, size_t count) {
  check(spec, in.size(), out.size());
  DeviceReduction job{};
  ReduceShares& shares = job.shares;
  std::copy(in.begin(), in.end(), shares.in);
  std::copy(out.begin(), out.end(), shares.out);
  shares.n_in = static_cast<int>(in.size());
  shares.n_out = static_cast<int>(out.size());
  shares.post = spec.post;
  shares.divisor = spec.divisor;
  shares.has_pre = spec.pre != nullptr;
  if (spec.pre != nullptr) {
    std::copy_n(spec.pre, in.size(), shares.pre);
  }
  const bool keeps_bits = in.size() == 1 && spec.pre == nullptr && spec.post == 1.0 &&
                          spec.divisor == 1 && spec.dtype != DType::boolean;
  // One operand of bytes: itself.
  job.kernel = keeps_bits ? LoweredReduction{DType::u8, ReduceOp::bor, size_of(spec.dtype)}
                          : lowered(spec.dtype, spec.op);
  shares.op = job.kernel.op;
  shares.count = count * job.kernel.width;
  cut(shares, size_of(job.kernel.dtype));
  return job;
}

void run_on_host(const DeviceReduction& job, size_t workers) {
  static constexpr ReduceTable<OnHost::Function, OnHost> kTable;
  const OnHost::Function run = kTable.find(job.kernel.dtype, job.kernel.op);
  for (size_t worker = 0; worker < workers; ++worker) {
    run(job.shares, worker, workers);
  }
}

void run_on_host(const DeviceReduction& job, const ShareSync& sync) {
  if (sync.has_barrier()) {
    run_blocks<element::InKernelBarrier>(job, sync);
  } else {
    run_blocks<element::StreamOrder>(job, sync);
  }
}

}  // namespace dpcore
