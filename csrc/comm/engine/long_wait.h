// Of what this process waits in, the operation that was called first: for those who want to know
// while it waits. All engines of the process note it at each of their looks, every 20 ms.
//
// Threads: any.
#pragma once

#include <cstdint>

namespace dpcore {

struct LongWait {
  // Of an operation that was not complete at the last look; 0: there is none.
  int64_t called_ns = 0;
  double timeout_s = 0;
};

void note_wait(const LongWait& wait, int64_t now_ns);
LongWait longest_wait(int64_t now_ns);

}  // namespace dpcore
