// A deterministic injector of faults for tests: DPCORE_FAULT="action:rank1:op7:middle".
//
//   action   kill (SIGKILL), stop (SIGSTOP), exit (status 0), abort, segv, throw, delay=MS
//   rankR    which rank (default: every rank)
//   opN      which operation number (default: the first that reaches the point)
//   point    init, grow, entry, middle, exit (default: entry), or thread: where the
//            process starts the N-th of our threads, of whatever rank; or shrink: N is
//            0 before it says that it is here, 1 after that, 2 when it has proposed, 3 when
//            it is about to meet, 4 when it has met, 5 when it has said so, 6 when it goes on
//
// Several faults are separated by commas. Without the variable a check costs one load of a
// constant; the variable is read when the first communicator starts.
#pragma once

#include <cstdint>

namespace dpcore::fault {

enum class Point : uint8_t { init, grow, entry, middle, exit, thread, shrink };

constexpr int kNoRank = -2;

// Whether DPCORE_FAULT holds anything. Throws Unsupported where it can't be read.
bool holds_any();

inline bool enabled() {
  static const bool any = holds_any();
  return any;
}

// Performs the action of every fault that matches. May not return.
void reach_slow(Point point, int rank, uint64_t operation);

inline void reach(Point point, int rank, uint64_t operation) {
  if (enabled()) [[unlikely]] {
    reach_slow(point, rank, operation);
  }
}

}  // namespace dpcore::fault
