// A schedule is data: an algorithm is a function from the number of ranks to a list of
// moves. The executor runs the list, the checker proves it, the cost model prices it,
// the viewer draws it and a numpy twin in dpcore/reference repeats it.
//
// Meaning of a list. Every rank holds `chunks` chunks. In step s all moves of step s
// happen at once, reading the values that were there before the step:
//   Move{s, src, dst, chunk, reduce=false}  dst's chunk becomes src's chunk
//   Move{s, src, dst, chunk, reduce=true}   dst's chunk becomes op(dst's, src's)
// Several reducing moves into the same chunk of the same rank in one step are one n-ary
// reduction, operands in rank order, dst's own value at its own place in that order.
//
// The order of the moves within a step has no influence on values. It is the order in which each
// rank sends: two ranks that send to the same third one at the same time share its NIC.
//
// What chunk numbers mean:
//   all_reduce      the algorithm cuts the buffer in `chunks` nearly equal parts
//   broadcast, reduce                likewise
//   reduce_scatter, all_gather       world chunks, chunk r belongs to rank r
//   gather, scatter                  world chunks, chunk r belongs to rank r
//   all_to_all      world*world chunks, chunk s*world+d goes from rank s to rank d
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/base/types.h"

namespace dpcore {

struct Move {
  int step = 0;
  int src = 0;
  int dst = 0;
  int chunk = 0;
  bool reduce = false;
  bool operator==(const Move&) const = default;
};

struct Schedule {
  std::string algorithm;
  Collective collective = Collective::all_reduce;
  int world = 1;
  int chunks = 1;
  int root = 0;
  // True when every reduction adds all contributions of a chunk at once, in rank order:
  // the result is then a function of the inputs alone (same bits for any chunking).
  bool ordered = false;
  std::vector<Move> moves;  // sorted by step, then as each rank sends them
};

// Throws Unsupported, listing the algorithms there are, when this one does not exist for
// the collective. world >= 1, 0 <= root < world.
// `hosts` says which ranks share one (equal numbers), for algorithms that care; empty: all do.
Schedule make_schedule(std::string_view algorithm, Collective collective, int world, int root = 0,
                       const std::vector<int>& hosts = {});

// The algorithms known for a collective, in a fixed order.
std::vector<std::string> algorithms_of(Collective collective);

}  // namespace dpcore
