// The ways in which a collective can be carried out; path_choice.h says when each is taken.
#pragma once

#include <cstdint>

#include "comm/base/types.h"

namespace dpcore {

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

}  // namespace dpcore
