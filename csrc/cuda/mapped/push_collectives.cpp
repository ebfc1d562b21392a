// See push_collectives.h.
#include "cuda/mapped/push_collectives.h"

#include <algorithm>

#include "comm/collective/geometry.h"

namespace dpcore {
namespace {

constexpr size_t kRowAlignment = 256;  // of parts in a stage

size_t padded(size_t bytes) { return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment; }

// What of a part lies in the chunk that begins there.
size_t rest_of(size_t part, size_t begin, size_t chunk) {
  return part <= begin ? 0 : std::min(part - begin, chunk);
}

}  // namespace

PushCollectives::PushCollectives(const StreamPages& at, RankBarrier& barrier,
                                 std::vector<std::byte*> stages)
    : device_(at.device),
      stream_(at.stream),
      barrier_(barrier),
      rank_(at.rank),
      stages_(std::move(stages)),
      in_(stages_.size()),
      out_(stages_.size()) {}

void PushCollectives::run(const Request& request, const PushPlan& plan, bool captured) {
  captured_ = captured;
  if (request.count == 0) {
    return;
  }
  if (plan.path == PushPath::direct_push) {
    run_direct(request, plan);
    return;
  }
  switch (request.collective) {
    case Collective::all_reduce:
      reduce_whole(request, plan.path == PushPath::one_shot_stage);
      break;
    case Collective::reduce_scatter:
      reduce_parts(request);
      break;
    case Collective::all_gather:
      gather_parts(request);
      break;
    default:
      broadcast(request);
      break;
  }
}

// ---- tensors of the arena ----------------------------------------------------------------------

void PushCollectives::run_direct(const Request& request, const PushPlan& plan) {
  const size_t element = size_of(request.dtype);
  const ElementRange slice = chunk_range(request.count, world(), rank_);
  const size_t largest = chunk_range(request.count, world(), 0).size() * element;
  const auto on_all = [&](auto& operands, const SharedRegions::Address& address, size_t elements) {
    operands.clear();
    for (int r = 0; r < world(); ++r) {
      operands.push_back(address.on(r) + elements * element);
    }
  };
  switch (request.collective) {
    case Collective::all_reduce:
      on_all(in_, plan.input, slice.begin);
      on_all(out_, plan.output, slice.begin);
      barrier_.reduce(spec_of(request), in_, out_, slice.size(), largest, {});
      break;
    case Collective::reduce_scatter:
      on_all(in_, plan.input, part_begin_of(request, request.input_parts, rank_));
      out_ = {request.output};
      barrier_.reduce(spec_of(request), in_, out_, part_of(request, request.input_parts, rank_),
                      request.count * element, {});
      break;
    case Collective::all_gather:
      in_ = {request.input};
      on_all(out_, plan.output, part_begin_of(request, request.output_parts, rank_));
      barrier_.reduce(spec_of(request), in_, out_, part_of(request, request.output_parts, rank_),
                      request.count * element, {});
      break;
    default:  // broadcast: every rank gives on a share of what the root has
      on_all(out_, plan.output, slice.begin);
      in_ = {out_[static_cast<size_t>(request.root)]};
      out_.erase(out_.begin() + request.root);
      barrier_.reduce(spec_of(request), in_, out_, slice.size(), largest, {});
      break;
  }
}

// ---- ordinary tensors, by way of the stage ------------------------------------------------------

void PushCollectives::reduce_whole(const Request& request, bool one_shot) {
  const size_t element = size_of(request.dtype);
  const size_t chunk = kPushStageBytes / element;
  const ReduceSpec spec = spec_of(request);
  for (size_t begin = 0; begin < request.count; begin += chunk) {
    const size_t n = std::min(chunk, request.count - begin);
    std::byte* result = request.output + begin * element;
    next_stage();
    bring_in(request, stage_of(rank_), request.input + begin * element, n);
    if (one_shot) {
      fill(0);
      out_ = {result};
      barrier_.reduce(spec, in_, out_, n, n * element, {true, captured_});
      continue;
    }
    const ElementRange slice = chunk_range(n, world(), rank_);
    fill(slice.begin * element);
    barrier_.reduce(spec, in_, out_, slice.size(), chunk_range(n, world(), 0).size() * element, {});
    copy(result, stage_of(rank_), n * element);
  }
}

void PushCollectives::reduce_parts(const Request& request) {
  const size_t element = size_of(request.dtype);
  const size_t most =
      kPushStageBytes / static_cast<size_t>(world()) / kRowAlignment * kRowAlignment;
  const size_t chunk = std::min(most / element, request.count);
  const size_t row = padded(chunk * element);
  for (size_t begin = 0; begin < request.count; begin += chunk) {
    next_stage();
    for (int r = 0; r < world(); ++r) {
      const size_t n = rest_of(part_of(request, request.input_parts, r), begin, chunk);
      const size_t at = part_begin_of(request, request.input_parts, r) + begin;
      bring_in(request, stage_of(rank_) + static_cast<size_t>(r) * row,
               request.input + at * element, n);
    }
    const size_t own = rest_of(part_of(request, request.input_parts, rank_), begin, chunk);
    fill(static_cast<size_t>(rank_) * row);
    out_ = {request.output + begin * element};
    barrier_.reduce(spec_of(request), in_, out_, own, chunk * element, {true, captured_});
  }
}

void PushCollectives::gather_parts(const Request& request) {
  const size_t element = size_of(request.dtype);
  const size_t chunk = kPushStageBytes / element;
  const auto part = [&](int r) { return part_of(request, request.output_parts, r); };
  for (size_t begin = 0; begin < request.count; begin += chunk) {
    next_stage();
    copy(stage_of(rank_), request.input + begin * element,
         rest_of(part(rank_), begin, chunk) * element);
    barrier_.wait();
    for (int i = 0; i < world(); ++i) {
      const int r = (rank_ + i) % world();  // not all ranks from the same one at once
      const size_t at = part_begin_of(request, request.output_parts, r) + begin;
      copy(request.output + at * element,
           r == rank_ ? request.input + begin * element : stage_of(r),
           rest_of(part(r), begin, chunk) * element);
    }
    if (captured_) {
      barrier_.wait();
    }
  }
}

// The root alone would give everything to all ranks: with more ranks each gives on a share.
void PushCollectives::broadcast(const Request& request) {
  const size_t element = size_of(request.dtype);
  const size_t chunk = kPushStageBytes / element;
  const bool is_root = rank_ == request.root;
  for (size_t begin = 0; begin < request.count; begin += chunk) {
    const size_t n = std::min(chunk, request.count - begin);
    next_stage();
    if (is_root) {
      copy(stage_of(rank_), request.input + begin * element, n * element);
      copy(request.output + begin * element, request.input + begin * element, n * element);
    }
    const bool shares = world() > 2;
    if (shares) {
      const ElementRange slice = chunk_range(n, world(), rank_);
      fill(slice.begin * element);
      in_ = {in_[static_cast<size_t>(request.root)]};
      out_.erase(out_.begin() + request.root);
      barrier_.reduce(spec_of(request), in_, out_, slice.size(),
                      chunk_range(n, world(), 0).size() * element, {});
    } else {
      barrier_.wait();
    }
    if (!is_root) {
      copy(request.output + begin * element, stage_of(shares ? rank_ : request.root), n * element);
    }
    if (captured_ && !shares) {
      barrier_.wait();
    }
  }
}

// ---- parts of the above -------------------------------------------------------------------------

void PushCollectives::next_stage() {
  if (!captured_) {
    turn_ = 1 - turn_;
  }
  stage_ = captured_ ? kPushStages - 1 : turn_;
}

std::byte* PushCollectives::stage_of(int r) const {
  return stages_[static_cast<size_t>(r)] + static_cast<size_t>(stage_) * kPushStageBytes;
}

// Operands in the stages of all ranks.
void PushCollectives::fill(size_t offset) {
  in_.clear();
  out_.clear();
  for (int r = 0; r < world(); ++r) {
    in_.push_back(stage_of(r) + offset);
    out_.push_back(stage_of(r) + offset);
  }
}

void PushCollectives::copy(void* to, const void* from, size_t bytes) {
  if (to != from && bytes > 0) {
    device_.copy(stream_, to, from, bytes);
  }
}

void PushCollectives::bring_in(const Request& request, std::byte* to, const std::byte* from,
                               size_t elements) {
  if (request.op != ReduceOp::premul_sum) {
    copy(to, from, elements * size_of(request.dtype));
  } else if (elements > 0) {
    const void* in = from;
    void* out = to;
    device_.reduce(stream_, {.dtype = request.dtype, .pre = &request.prescale}, {&in, 1}, {&out, 1},
                   elements);
  }
}

// What only moves bytes is a reduction of one operand, which keeps its bits.
ReduceSpec PushCollectives::spec_of(const Request& request) const {
  const bool moves_only =
      request.collective == Collective::all_gather || request.collective == Collective::broadcast;
  if (moves_only) {
    const bool has_values = request.dtype == DType::boolean;  // would be made 0 or 1
    return {.dtype = has_values ? DType::u8 : request.dtype};
  }
  return reduction_over(world(), request.op, request.dtype);
}

}  // namespace dpcore
