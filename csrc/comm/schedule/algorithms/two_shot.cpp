// Two steps through owners: the buffer is cut in one chunk per rank, and rank c owns chunk c.
//
//   all_reduce   1. every owner takes its chunk from all ranks and reduces it
//                2. every owner gives the result to all ranks
//   reduce       1. the same    2. every owner gives its result to the root
//   broadcast    1. the root gives every owner its chunk
//                2. every owner gives its chunk to all ranks that do not have it yet
//
// Cost (S the buffer, N ranks), for the busiest rank in one direction:
//   all_reduce   2 steps, 2(N-1)/N S: as few bytes as a ring in two steps instead of 2(N-1)
//   reduce       2 steps, 2(N-1)/N S into the root, instead of the (N-1) S of the direct plan
//   broadcast    2 steps, 2(N-1)/N S out of the root, instead of the (N-1) S of the direct plan
//
// All are ordered: the owner holds all operands of its chunk at once and adds them in rank
// order, so the bits of the result do not depend on how the buffer is cut.
//
// On memory that all ranks have mapped, the all_reduce is a single pass: the owner reads N
// inputs and writes N outputs, each byte once in each direction. That is why it is the default
// within a host.
//
// The order of sends matters on a network. Rank r begins each step with rank r+1 (schedule.cpp), so
// at any moment every NIC sends one chunk and receives one. If all began with rank 0, then sent to
// rank 1, and so on, the receivers' NICs would be busy one after the other: with a chunk per
// message 2N-3 times as long as a chunk takes, instead of N-1.
//
// When it loses: messages so small that the second step costs more than the bytes it saves
// (one_shot), and networks where N-1 streams at a time into one rank collide (ring).
#include "comm/schedule/algorithms/algorithms.h"

namespace dpcore::algorithms {

Plan two_shot_all_reduce(int world, int root) {
  Plan plan = direct_reduce_scatter(world, root);
  for (const Move& move : direct_all_gather(world, root).moves) {
    plan.moves.push_back({1, move.src, move.dst, move.chunk, false});
  }
  return plan;
}

Plan two_shot_reduce(int world, int root) {
  Plan plan = direct_reduce_scatter(world, root);
  for (const Move& move : direct_gather(world, root).moves) {
    plan.moves.push_back({1, move.src, move.dst, move.chunk, false});
  }
  return plan;
}

Plan two_shot_broadcast(int world, int root) {
  Plan plan = direct_scatter(world, root);
  for (const Move& move : direct_all_gather(world, root).moves) {
    // The root has had everything from the beginning.
    if (move.dst != root) {
      plan.moves.push_back({1, move.src, move.dst, move.chunk, false});
    }
  }
  return plan;
}

}  // namespace dpcore::algorithms
