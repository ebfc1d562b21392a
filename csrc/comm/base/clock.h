// Time as the core sees it: nanoseconds of CLOCK_MONOTONIC, the same clock for every
// process of a host, so that traces of several ranks line up without any exchange.
#pragma once

#include <time.h>

#include <cstdint>
#include <cstdio>
#include <string>

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

// As good as never (146 years), and far enough from the end of the type that the time since the
// machine was started and some grace can be added.
inline constexpr int64_t kForeverNs = int64_t{1} << 62;

// Infinity, and whatever is longer than kForeverNs, is kForeverNs.
inline int64_t to_ns(double seconds) {
  return seconds * 1e9 < static_cast<double>(kForeverNs) ? static_cast<int64_t>(seconds * 1e9)
                                                         : kForeverNs;
}

// "0.25 s", "30 s"
inline std::string in_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", seconds);
  return text;
}

}  // namespace dpcore
