// Proves a schedule by running it on symbols instead of numbers: each rank's copy of a chunk is
// the set of ranks whose contribution it contains. If every required copy ends with every
// contribution exactly once, the schedule is right for any data and any operator.
//
// Since moves of one step happen at once and a step waits for the one before, a list in which
// every move sends something its sender holds cannot deadlock either.
#pragma once

#include <vector>

#include "comm/schedule/schedule.h"

namespace dpcore {

// Throws Error, naming the first offending move, unless all of this holds:
//   * ranks, chunks and steps are in range, moves are sorted by step, no rank sends to itself,
//     the number of chunks suits the collective;
//   * no chunk of a rank is copied into twice in one step, nor copied and reduced into;
//   * no rank sends a chunk that it does not hold, and none adds one contribution twice;
//   * at the end every rank holds what the collective promises it, complete;
//   * a schedule that calls itself ordered is.
// A schedule that is ordered without saying so passes: it promises less than it keeps.
void check(const Schedule& schedule);

// For each move: whether it reduces and its destination is complete after its step. The
// executor scales by 1/world there, and only there, to make a mean. Throws like check().
std::vector<bool> completing_moves(const Schedule& schedule);

// Whether every reduction adds all contributions of its chunk at once, each from the rank that
// it belongs to: what Schedule::ordered may claim. Throws like check(), except for that claim.
bool is_ordered(const Schedule& schedule);

}  // namespace dpcore
