// Which stores write what other ranks read: most copies go the way that takes less time, also after
// that has changed, and copies that were interrupted change nothing.
#include <cstdio>

#include "check.h"
#include "comm/reduce/way_to_peers.h"

using namespace dpcore;

namespace {

constexpr size_t kBytes = 32 << 10;

struct Machine {
  uint64_t ticks[2];  // of a copy, by its way
  WayToPeers way = {};

  // Of so many copies, those past the caches.
  int past_of(int copies) {
    int past = 0;
    for (int i = 0; i < copies; ++i) {
      const WayToPeers::Way chosen = way.next();
      const bool is_interrupted = i % 10 == 0;
      past += chosen == WayToPeers::past_caches;
      way.took(chosen, is_interrupted ? 30'000'000 : ticks[chosen], kBytes);
    }
    return past;
  }
};

void check_that_it_follows() {
  constexpr int kMany = 8192;
  Machine machine{{20'000, 6'000}};
  CHECK(machine.past_of(kMany) > kMany - 64);
  machine.ticks[WayToPeers::ordinary] = 2'000;  // the processors are threads of a core now
  CHECK(machine.past_of(kMany) < 64);
  machine.ticks[WayToPeers::ordinary] = 20'000;
  CHECK(machine.past_of(kMany) > kMany - 64);
}

// The writer takes about the same time either way, and the reader longer.
void check_that_the_reader_counts() {
  Machine machine{{6'000, 5'000}};
  CHECK(machine.past_of(8192) < 64);
}

}  // namespace

int main() {
  check_that_it_follows();
  check_that_the_reader_counts();
  std::printf("the faster way: fine\n");
}
