// See process_mark.h.
#include "cuda/device/process_mark.h"

#include <sys/random.h>
#include <unistd.h>

#include <mutex>

#include "comm/base/error.h"

namespace dpcore {

uint64_t process_mark() {
  static std::mutex mutex;
  static uint64_t mark = 0;
  static pid_t drawn_in = 0;  // a forked child has another number than its parent, wherever it is
  const std::lock_guard<std::mutex> lock(mutex);
  while (mark == 0 || drawn_in != getpid()) {
    if (getrandom(&mark, sizeof(mark), 0) != static_cast<ssize_t>(sizeof(mark))) {
      throw Error("the system gives no random numbers");
    }
    drawn_in = getpid();
  }
  return mark;
}

}  // namespace dpcore
