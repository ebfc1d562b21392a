// The names of paths in statistics and traces.
#include "comm/collective/path.h"

namespace dpcore {

const char* name_of(Path path, Collective collective) {
  const bool all_reduce = collective == Collective::all_reduce;
  switch (path) {
    case Path::alone:
      return path_name::kAlone;
    case Path::barrier:
      return path_name::kBarrier;
    case Path::two_shot_push:
      return path_name::kTwoShotPush;
    case Path::pull:
      return all_reduce ? path_name::kOneShotPull : path_name::kDirectPull;
    case Path::read:
      return path_name::kDirectRead;
    case Path::push:
      return path_name::kDirectPush;
    case Path::shared:
      return path_name::kDirectShared;
    case Path::stage:
      return all_reduce ? path_name::kOneShotStage : path_name::kDirectStage;
    case Path::two_shot_stage:
      return path_name::kTwoShotStage;
    case Path::moves:
      return path_name::kMoves;
    case Path::automatic:
      break;
  }
  return "automatic";
}

}  // namespace dpcore
