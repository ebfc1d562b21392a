// A thread that leaves processors: where it is then, and that it may run wherever it might before.
// One that wants to wake promptly: how long its turns are then, and that nothing else is different.
#include "comm/base/processors.h"

#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

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

struct Scheduling {  // sched_attr of the kernel
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns, rest[3];
};

Scheduling scheduling() {
  Scheduling found{};
  CHECK(syscall(SYS_sched_getattr, 0, &found, sizeof(found), 0) == 0);
  return found;
}

bool knows_turns() {
  utsname kernel{};
  int major = 0;
  int minor = 0;
  CHECK(uname(&kernel) == 0 && std::sscanf(kernel.release, "%d.%d", &major, &minor) == 2);
  return major > 6 || (major == 6 && minor >= 12);
}

void its_turns_are_short() {
  std::thread([] {
    const Scheduling before = scheduling();
    wake_promptly();
    const Scheduling after = scheduling();
    CHECK(after.runtime_ns == (knows_turns() ? 100'000 : before.runtime_ns));
    CHECK(after.policy == before.policy && after.nice == before.nice);
    CHECK(after.flags == before.flags);
  }).join();
}

void an_idle_thread_stays_one() {
  std::thread([] {
    const sched_param none{};
    CHECK(sched_setscheduler(0, SCHED_IDLE, &none) == 0);
    wake_promptly();
    CHECK(scheduling().policy == SCHED_IDLE);
  }).join();
}

}  // namespace

int main() {
  where_everything_is_taken_it_stays();
  it_is_elsewhere();
  its_turns_are_short();
  an_idle_thread_stays_one();
  std::puts("processors: fine");
  return 0;
}
