// The names of paths in statistics and traces.
#include "comm/collective/path.h"

namespace dpcore {

const char* name_of(Path path, Collective collective) {
  const bool all_reduce = collective == Collective::all_reduce;
  switch (path) {
    case Path::alone:
      return "alone";
    case Path::barrier:
      return "barrier";
    case Path::two_shot_push:
      return "two_shot/push";
    case Path::pull:
      return all_reduce ? "one_shot/pull" : "direct/pull";
    case Path::push:
      return "direct/push";
    case Path::shared:
      return "direct/shared";
    case Path::stage:
      return all_reduce ? "one_shot/stage" : "direct/stage";
    case Path::two_shot_stage:
      return "two_shot/stage";
    case Path::moves:
      return "moves";
    case Path::automatic:
      break;
  }
  return "automatic";
}

}  // namespace dpcore
