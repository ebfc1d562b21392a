// See long_wait.h.
#include "comm/engine/long_wait.h"

#include <mutex>

namespace dpcore {
namespace {

// An operation that was not seen for so long is complete; a busy machine may look late.
constexpr int64_t kOverNs = 1'000'000'000;

struct Noted {
  std::mutex mutex;
  LongWait wait;
  int64_t seen_ns = 0;
};

Noted& noted() {
  static Noted noted;
  return noted;
}

}  // namespace

void note_wait(const LongWait& wait, int64_t now_ns) {
  Noted& noted = dpcore::noted();
  const std::lock_guard<std::mutex> lock(noted.mutex);
  if (wait.called_ns <= noted.wait.called_ns || now_ns - noted.seen_ns > kOverNs) {
    noted.wait = wait;
    noted.seen_ns = now_ns;
  }
}

LongWait longest_wait(int64_t now_ns) {
  Noted& noted = dpcore::noted();
  const std::lock_guard<std::mutex> lock(noted.mutex);
  return now_ns - noted.seen_ns > kOverNs ? LongWait{} : noted.wait;
}

}  // namespace dpcore
