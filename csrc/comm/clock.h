// Time as the core sees it: nanoseconds of CLOCK_MONOTONIC, the same clock for every
// process of a host, so that traces of several ranks line up without any exchange.
#pragma once

#include <time.h>

#include <cstdint>

namespace dpcore {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// The same clock as the kernel's last tick left it: some milliseconds old, a third of the price.
inline int64_t now_roughly_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

inline int64_t to_ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

}  // namespace dpcore
