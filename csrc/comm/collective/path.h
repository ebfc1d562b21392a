// The ways in which a collective can be carried out; comm/operations/collective_operation.h says
// when each is taken.
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
  push,
  shared,
  stage,
  two_shot_stage,
  moves,
};
inline constexpr int kPathCount = 10;

// "two_shot/push" and so on: the schedule a path implements, and how it reaches the data.
const char* name_of(Path path, Collective collective);

}  // namespace dpcore
