// A thread that leaves processors: where it is then, and that it may run wherever it might before.
#include "comm/base/processors.h"

#include <cstdio>

#include "check.h"

using namespace dpcore;

namespace {

cpu_set_t allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
  return set;
}

cpu_set_t only(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  return set;
}

void may_run_on(const cpu_set_t& set) { CHECK(sched_setaffinity(0, sizeof(set), &set) == 0); }

bool leaves(const cpu_set_t& taken) {
  const cpu_set_t before = allowed();
  const bool left = leave_processors(taken);
  const cpu_set_t after = allowed();
  CHECK(CPU_EQUAL(&before, &after));
  return left;
}

void where_everything_is_taken_it_stays() {
  const cpu_set_t everywhere = allowed();
  CHECK(!leaves(everywhere));
  const int here = sched_getcpu();
  may_run_on(only(here));
  CHECK(usable_processors() == 1);
  CHECK(!leaves(only(here)));
  may_run_on(everywhere);
  CHECK(usable_processors() == CPU_COUNT(&everywhere));
}

// The kernel may move it back at once, though hardly every time.
void it_is_elsewhere() {
  const cpu_set_t everywhere = allowed();
  int found_elsewhere = 0;
  for (int i = 0; i < 20; ++i) {
    const int here = sched_getcpu();
    may_run_on(only(here));
    may_run_on(everywhere);
    if (!leaves(only(here))) {
      return;  // the only one of its node
    }
    found_elsewhere += sched_getcpu() != here ? 1 : 0;
  }
  CHECK(found_elsewhere > 0);
}

}  // namespace

int main() {
  where_everything_is_taken_it_stays();
  it_is_elsewhere();
  std::puts("processors: fine");
  return 0;
}
