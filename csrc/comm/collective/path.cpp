// The names of paths in statistics and traces, and when a path pays.
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

// The kernel's copy costs three times as much per byte as one from mapped memory, and 2 us, so what
// counts is how much of the stage's work it saves. One piece for each taker is copied into the
// stage as often as it is taken out of it: reading saves half. One piece for all is copied in once,
// so with several takers the stage is ahead, and with one up to sizes at which the stage's two
// halves overlap. In a gather all givers copy into their stages at once, which reading would leave
// to the root.
bool is_faster_read(Collective collective, size_t bytes, int world) {
  const size_t piece = bytes / static_cast<size_t>(world);
  switch (collective) {
    case Collective::scatter:
      return piece >= size_t{64} << 10;
    case Collective::all_to_all:
      return piece >= size_t{256} << 10;
    case Collective::all_gather:
    case Collective::broadcast:
      return world == 2 && piece >= size_t{64} << 10 && piece <= size_t{1} << 20;
    default:
      return false;
  }
}

}  // namespace dpcore
