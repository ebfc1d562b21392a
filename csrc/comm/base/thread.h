// Starting a thread of ours. Containers and users have limits of how many there may be, and the
// standard library's error for that names neither the thread nor the remedy.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>

#include "comm/base/error.h"
#include "comm/base/fault.h"

namespace dpcore {

// In this process, counted from 0.
inline std::atomic<uint64_t> thread_starts{0};

// `name` and `purpose` stand in the Error: "dpcore-progress", "drives asynchronous operations".
template <class Body>
std::thread start_thread(const char* name, const char* purpose, Body&& body) {
  try {
    fault::reach(fault::Point::thread, fault::kNoRank, thread_starts.fetch_add(1));
    return std::thread(std::forward<Body>(body));
  } catch (const std::exception& problem) {
    throw Error("the thread " + std::string(name) + ", which " + purpose +
                ", can't be started: " + problem.what() +
                ". The process, its user or its container has as many threads as it may have. "
                "Raise that limit (the container's pids limit, ulimit -u) or start fewer threads "
                "(OMP_NUM_THREADS, workers of DataLoaders); then the call may be made again");
  }
}

}  // namespace dpcore
