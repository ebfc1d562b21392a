// Which path an operation takes, and what of it all ranks must have in common. See
// push_collectives.h.
#include <array>

#include "comm/base/fnv.h"
#include "comm/collective/geometry.h"
#include "cuda/mapped/push_collectives.h"

namespace dpcore {
namespace {

constexpr std::array<std::string_view, kPushPaths> kNames = {
    path_name::kMoves, path_name::kDirectPush, path_name::kTwoShotStage, path_name::kOneShotStage,
    path_name::kDirectStage};
// Up to here, counted over all readers, one more barrier costs more than reading everything.
constexpr size_t kOneShotBytes = size_t{1} << 20;

bool goes_in_one_shot(const Request& request, int world) {
  return request.count * size_of(request.dtype) * static_cast<size_t>(world) <= kOneShotBytes;
}

bool has_schedule(Collective collective, const std::string& algorithm) {
  if (algorithm == "auto") {
    return true;
  }
  switch (collective) {
    case Collective::all_reduce:
      return algorithm == "two_shot" || algorithm == "one_shot";
    case Collective::broadcast:
      return algorithm == "two_shot" || algorithm == "direct";
    default:
      return algorithm == "direct";
  }
}

}  // namespace

std::string_view name_of(PushPath path) { return kNames[static_cast<size_t>(path)]; }

const char* name_of(PushPath path, Collective collective, int world) {
  // Of what the root has every rank gives on a slice, but for two ordinary tensors.
  const bool broadcasts = collective == Collective::broadcast;
  if (path == PushPath::direct_push && (broadcasts || collective == Collective::all_reduce)) {
    return path_name::kTwoShotPush;
  }
  return path == PushPath::stage && broadcasts && world > 2 ? path_name::kTwoShotStage
                                                            : name_of(path).data();
}

PushPlan plan_push(const Request& request, const std::string& algorithm, int world,
                   const SharedRegions& regions) {
  PushPlan plan;
  const Collective collective = request.collective;
  const bool reduces_whole = collective == Collective::all_reduce;
  if (world == 1 || !has_schedule(collective, algorithm) ||
      (!reduces_whole && collective != Collective::reduce_scatter &&
       collective != Collective::all_gather && collective != Collective::broadcast)) {
    return plan;
  }
  const size_t element = size_of(request.dtype);
  const size_t whole = request.count * element;
  const bool one_shot = reduces_whole && algorithm != "two_shot" &&
                        (algorithm == "one_shot" || goes_in_one_shot(request, world));
  plan.path = one_shot ? PushPath::one_shot_stage
                       : (reduces_whole ? PushPath::two_shot_stage : PushPath::stage);
  if (one_shot || request.op == ReduceOp::premul_sum) {
    return plan;
  }
  const auto all_parts = [&](const std::vector<uint64_t>& parts) {
    return part_begin_of(request, parts, world) * element;
  };
  SharedRegions::Address input;
  SharedRegions::Address output;
  bool is_direct = false;
  if (reduces_whole) {
    input = regions.find(request.input, whole);
    output = regions.find(request.output, whole);
    is_direct = input && output;
  } else if (collective == Collective::reduce_scatter) {
    input = regions.find(request.input, all_parts(request.input_parts));
    is_direct = static_cast<bool>(input);
  } else if (collective == Collective::all_gather) {
    output = regions.find(request.output, all_parts(request.output_parts));
    is_direct = static_cast<bool>(output);
  } else {  // in place: the root's output is its input
    output = regions.find(request.output, whole);
    is_direct = output && request.input == request.output;
  }
  if (is_direct) {
    plan = {PushPath::direct_push, input, output};
  }
  return plan;
}

uint64_t layout_of(const PushPlan& plan) {
  Fnv hash;
  for (const SharedRegions::Address* address : {&plan.input, &plan.output}) {
    hash.add(*address ? address->region->id + 1 : 0).add(address->offset);
  }
  return hash.add(static_cast<uint64_t>(plan.path)).value();
}

}  // namespace dpcore
