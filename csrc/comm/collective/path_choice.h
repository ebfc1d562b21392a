// Which path a collective takes, and who copies what on it: pure functions of what all ranks have
// posted, so all decide alike.
//
//   alone          world of one
//   two_shot/push  all_reduce, every buffer in an arena: each rank reduces its slice straight
//                  from all inputs into all outputs. 2*S bytes per rank, the floor.
//   direct/pull    every input that is read lies in an arena: read it there
//   direct/read    ordinary memory that the others may read, where that is faster than the stage
//   direct/push    every output that is written lies in an arena: write it there
//   direct/shared  both, one root and many bytes: the root copies a part, the others the rest
//   one_shot/stage, direct/stage      small, or ordinary memory: copied into the stage chunk by
//                  chunk, reduced or copied out of the peers' stages by whoever needs it
//   two_shot/stage all_reduce of ordinary memory: two_shot/push on the stages, between copies
//   moves          the list of a schedule, executed literally over the transport; between ranks
//                  that share no memory everything that is not small
#pragma once

#include <cstddef>

#include "comm/collective/request.h"

namespace dpcore {

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
