// The kernel is asked with sched_getaffinity and sched_setaffinity; nodes are read from /sys.
#include "comm/base/processors.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace dpcore {
namespace {

bool get_allowed(cpu_set_t& allowed, pid_t process = 0) {
  CPU_ZERO(&allowed);
  return sched_getaffinity(process, sizeof(allowed), &allowed) == 0;
}

// All processors where the kernel tells of no nodes. A list is "0-3,8-11".
cpu_set_t processors_of_this_node() {
  cpu_set_t found;
  CPU_ZERO(&found);
  unsigned node = 0;
  syscall(SYS_getcpu, nullptr, &node, nullptr);  // glibc has a function since 2.29 only
  std::ifstream list("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  int first = 0;
  while (list >> first) {
    int last = first;
    if (list.peek() == '-') {
      list.ignore() >> last;
    }
    for (int processor = first; processor <= last; ++processor) {
      CPU_SET(processor, &found);
    }
    list.ignore();
  }
  if (CPU_COUNT(&found) == 0) {
    for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
      CPU_SET(processor, &found);
    }
  }
  return found;
}

}  // namespace

int usable_processors() {
  cpu_set_t allowed;
  return get_allowed(allowed) ? CPU_COUNT(&allowed) : 1;
}

bool may_meet(pid_t other) {
  cpu_set_t mine;
  cpu_set_t theirs;
  if (!get_allowed(mine) || !get_allowed(theirs, other)) {
    return true;
  }
  cpu_set_t both;
  CPU_AND(&both, &mine, &theirs);
  return CPU_COUNT(&both) > 0;
}

bool leave_processors(const cpu_set_t& taken) {
  cpu_set_t allowed;
  if (!get_allowed(allowed)) {
    return false;
  }
  const cpu_set_t near = processors_of_this_node();
  cpu_set_t there;
  CPU_ZERO(&there);
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &allowed) && CPU_ISSET(processor, &near) &&
        !CPU_ISSET(processor, &taken)) {
      CPU_SET(processor, &there);
    }
  }
  return CPU_COUNT(&there) > 0 && sched_setaffinity(0, sizeof(there), &there) == 0 &&
         sched_setaffinity(0, sizeof(allowed), &allowed) == 0;
}

namespace {

struct SchedulerAttributes {  // glibc has it since 2.41
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;  // of an ordinary thread: how long its turns are
  uint64_t deadline_ns;
  uint64_t period_ns;
  uint32_t least_load;
  uint32_t most_load;
};

constexpr uint64_t kShortestTurnNs = 100'000;  // that Linux grants

}  // namespace

// Of two threads that are owed a processor, Linux takes the one whose turn would be over first, and
// one that wakes up with a shorter turn ends the other's.
void wake_promptly() {
  SchedulerAttributes attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) == 0 &&
      attributes.policy == SCHED_OTHER) {
    attributes.runtime_ns = kShortestTurnNs;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
  }
}

}  // namespace dpcore
