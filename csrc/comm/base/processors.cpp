// The kernel is asked with sched_getaffinity and sched_setaffinity; nodes are read from /sys.
#include "comm/base/processors.h"

#include <sys/syscall.h>
#include <unistd.h>

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

}  // namespace dpcore
