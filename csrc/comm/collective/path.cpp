// See path.h.
#include "comm/collective/path.h"

#include "comm/collective/geometry.h"
#include "comm/reduce/reduce.h"

namespace dpcore {
namespace {

// From here on the ranks of a rooted collective share the copying.
constexpr size_t kSharedBytes = size_t{64} << 10;

}  // namespace

Path choose_path(const Request& request, int world, const Reach& reach) {
  if (world == 1) {
    return Path::alone;
  }
  if (request.collective == Collective::barrier) {
    return Path::barrier;
  }
  if (request.program) {
    return Path::moves;
  }
  const Path wanted = request.force;
  if (announces_parts(request) || wanted == Path::stage) {
    return Path::stage;
  }
  const bool all_mapped = reach.inputs_mapped && reach.outputs_mapped;
  if (request.collective == Collective::all_reduce) {
    const bool may_push = wanted == Path::automatic || wanted == Path::two_shot_push;
    return all_mapped && may_push ? Path::two_shot_push : Path::two_shot_stage;
  }
  const bool reduces = dpcore::reduces(request.collective);
  if (all_mapped && has_root(request.collective) && !reduces &&
      bytes_of(request, world) >= kSharedBytes) {
    return Path::shared;
  }
  if (reach.inputs_mapped) {
    return Path::pull;
  }
  if (reach.outputs_mapped && !reduces) {
    return Path::push;
  }
  return reach.inputs_readable ? Path::read : Path::stage;
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
    case Collective::broadcast:
      if (bypasses_caches()) {  // then its stage is faster
        return false;
      }
      [[fallthrough]];
    case Collective::all_gather:
      return world == 2 && piece >= size_t{64} << 10 && piece <= size_t{1} << 20;
    default:
      return false;
  }
}

ByteRange own_share(const Request& request, Path path, int me, int world, size_t bytes,
                    bool giving) {
  if (path == Path::shared) {
    const size_t cut = bytes / static_cast<size_t>(world) / 64 * 64;
    return me == request.root ? ByteRange{0, cut} : ByteRange{cut, bytes};
  }
  return giving == (path == Path::push) ? ByteRange{0, bytes} : ByteRange{};
}

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
