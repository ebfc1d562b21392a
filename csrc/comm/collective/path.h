// The ways in which a collective can be carried out, which one is taken when, and what a rank
// copies on it: pure functions of what all ranks have posted, so all decide alike.
//
//   alone          world of one
//   two_shot/push  all_reduce, every buffer in an arena: each rank reduces its slice straight
//                  from all inputs into all outputs. 2*S bytes per rank, the floor.
//   direct/pull    every input that is read lies in an arena: read it there
//   direct/read    ordinary memory that the peers may read, where that is faster than the stage
//   direct/push    every output that is written lies in an arena: write it there
//   direct/shared  both, one root and many bytes: the root copies a part, the others the rest
//   one_shot/stage, direct/stage      small, or ordinary memory: copied into the stage chunk by
//                  chunk, reduced or copied out of the peers' stages by each rank that needs it
//   two_shot/stage all_reduce of ordinary memory: two_shot/push on the stages, between copies
//   moves          the list of a schedule, executed literally over the transport; between ranks
//                  that share no memory everything that is not small
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/base/types.h"

namespace dpcore {

struct Request;

enum class Path : uint8_t {
  automatic,
  alone,
  barrier,
  two_shot_push,
  pull,
  read,
  push,
  shared,
  stage,
  two_shot_stage,
  moves,
};
inline constexpr int kPathCount = 11;

// What statistics and traces call a path: the schedule that it implements, and how it reaches the
// data. Every path of every communicator is here, those on devices too.
namespace path_name {

inline constexpr char kAlone[] = "alone";
inline constexpr char kBarrier[] = "barrier";
inline constexpr char kMoves[] = "moves";  // a list of moves, as it stands
inline constexpr char kOneShotPull[] = "one_shot/pull";
inline constexpr char kOneShotStage[] = "one_shot/stage";
inline constexpr char kTwoShotPush[] = "two_shot/push";
inline constexpr char kTwoShotStage[] = "two_shot/stage";
inline constexpr char kDirectPull[] = "direct/pull";
inline constexpr char kDirectRead[] = "direct/read";
inline constexpr char kDirectPush[] = "direct/push";
inline constexpr char kDirectShared[] = "direct/shared";
inline constexpr char kDirectStage[] = "direct/stage";
inline constexpr char kDirectNccl[] = "direct/nccl";  // messages between every two ranks
inline constexpr char kNccl[] = "nccl";               // NCCL does not say which schedule it took

}  // namespace path_name

const char* name_of(Path path, Collective collective);

// What peers can reach of the buffers of those that publish, or consume.
struct Reach {
  bool inputs_mapped = true;    // all lie in an arena
  bool outputs_mapped = true;   // the same
  bool inputs_readable = true;  // all of them, out of their owners' processes
};

// Of what is not over when all have entered.
Path choose_path(const Request& request, int world, const Reach& reach);

// Whether ordinary memory is copied faster when takers read it out of their peers' processes than
// through the stage: `bytes` are those of the whole operation.
bool is_faster_read(Collective collective, size_t bytes, int world);

struct ByteRange {
  size_t begin = 0;
  size_t end = 0;
};

// The bytes of a piece that this rank copies, as its giver or as its taker, on the paths pull, push
// and shared.
ByteRange own_share(const Request& request, Path path, int me, int world, size_t bytes,
                    bool giving);

}  // namespace dpcore
