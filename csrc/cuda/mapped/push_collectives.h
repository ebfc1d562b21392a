// Collectives over memory that all ranks have mapped: one pass of reading from all of them and
// writing to all of them, without a message.
//
//   direct_push   tensors lie in the arena, at the same place on all ranks. Each rank owns a slice,
//                 reads it from all inputs in rank order and writes the result to all outputs. A
//                 barrier before (every rank's data is there) and one behind (all is written). 2 S
//                 of traffic per rank for an all-reduce, the floor; reduce-scatter, all-gather and
//                 broadcast move each byte once.
//   two_shot_stage   ordinary tensors, chunk by chunk: copied into the own stage, the same as above
//                 on the stages, and copied out. 6 S.
//   one_shot_stage   small ones: copied into the stage, then every rank reduces all of them for
//                 itself. One barrier: stages take turns, and a rank that comes to the next barrier
//                 has read those of the one before. (N + 3) S.
//   stage         the other collectives of ordinary tensors: in, one barrier, out.
//
// All of them are the ordered schedules (one_shot, two_shot, direct): the bits are those of the
// CPU. Sums with factors per rank go through the stage, scaled on their way in.
//
// A captured graph may run at any time: its operations use a stage of their own, and have a barrier
// behind their work too.
//
// Memory: stages are the communicator's; nothing is owned here. Threads: the one that holds its
// lock.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/collective/request.h"
#include "cuda/mapped/rank_barrier.h"
#include "cuda/mapped/shared_regions.h"

namespace dpcore {

enum class PushPath : uint8_t { none, direct_push, two_shot_stage, one_shot_stage, stage };

inline constexpr size_t kPushPaths = 5;
std::string_view name_of(PushPath path);
// The same with the schedule that a collective runs on it: "two_shot/push". A literal.
const char* name_of(PushPath path, Collective collective, int world);

struct PushPlan {
  PushPath path = PushPath::none;
  SharedRegions::Address input;   // where others read, if they do
  SharedRegions::Address output;  // where others write
};

// What the operation takes; `none` for those that are lists of moves. Ranks that call alike, with
// their tensors at the same places, get the same.
PushPlan plan_push(const Request& request, const std::string& algorithm, int world,
                   const SharedRegions& regions);
// What all ranks have to agree on besides the request.
uint64_t layout_of(const PushPlan& plan);

class PushCollectives {
 public:
  static constexpr size_t kPushStageBytes = size_t{16} << 20;
  static constexpr int kPushStages = 3;  // two that take turns, one of captured operations

  // `stages`: kPushStages * kPushStageBytes of every rank, as this device sees them.
  PushCollectives(const StreamPages& at, RankBarrier& barrier, std::vector<std::byte*> stages);
  // Puts all of it into the stream.
  void run(const Request& request, const PushPlan& plan, bool captured);

 private:
  void run_direct(const Request& request, const PushPlan& plan);
  void reduce_whole(const Request& request, bool one_shot);  // all_reduce
  void reduce_parts(const Request& request);                 // reduce_scatter
  void gather_parts(const Request& request);                 // all_gather
  void broadcast(const Request& request);

  int world() const { return static_cast<int>(stages_.size()); }
  void next_stage();
  std::byte* stage_of(int r) const;
  void copy(void* to, const void* from, size_t bytes);
  void bring_in(const Request& request, std::byte* to, const std::byte* from, size_t elements);
  ReduceSpec spec_of(const Request& request) const;
  void fill(size_t offset);

  Device& device_;
  Device::Stream stream_;
  RankBarrier& barrier_;
  int rank_;
  std::vector<std::byte*> stages_;
  int turn_ = 0;
  int stage_ = 0;
  bool captured_ = false;
  std::vector<const void*> in_;
  std::vector<void*> out_;
};

}  // namespace dpcore
