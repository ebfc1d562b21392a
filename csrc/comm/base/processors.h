// Which processors the calling thread may use, and moving it off some of them.
#pragma once

#include <sched.h>
#include <sys/types.h>

namespace dpcore {

int usable_processors();

// Whether another process of this host may run on one of them. True where the kernel does not tell.
bool may_meet(pid_t other);

// Moves the calling thread to a processor of its NUMA node that is none of `taken`. Where it may
// run stays as it is, so the kernel may move it on. False where there is no such processor.
bool leave_processors(const cpu_set_t& taken);

// From now on the calling thread, each time that it wakes up, takes a processor away from a thread
// that computes, as far as its fair share goes. For threads that sleep often and run briefly. Linux
// before 6.12 knows no such wish and does as before, and so does one that refuses it.
void wake_promptly();

}  // namespace dpcore
