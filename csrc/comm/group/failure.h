// The life of a failure, written once: for a group of ranks (group.h, and through it for
// communicators of a device), for all groups of an endpoint together, and for the engine of MPI
// (dpcore/comm/communicators/mpi/engine.py).
//
//   raised        a rank finds what went wrong: a death, a deadline, a mismatch, an interrupt
//   kept          the first failure stays, for good; what is found later is a consequence of it
//   told          before any thread of this rank can see it, it is written where peers look: into
//                 the abort record and into frames, or into messages of MPI
//   adopted       a peer that finds it there makes it its own failure, instead of judging by itself
//   raised again  every later call raises the same class with the same text
//   acknowledged  the program has been told: the end of the communicator need not raise it
//
// Memory: the record and its message are copies that live as long as this object; nothing points
// into memory that peers write. Threads: any may call anything. A thread that asks if there is a
// failure reads one atomic, and that is all that an operation without one ever does; the lock is
// for a failure that is being kept or read. Nothing here wakes anyone: Group rings its peers once
// the failure is kept, and threads of this rank that wait poll is_set().
#pragma once

#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/memory/control.h"

namespace dpcore {

struct Failure {
  FailureRecord record;
  std::string message;  // what is raised here
};

inline FailureRecord make_record(ErrorKind kind, int culprit, int reporter, uint64_t operation,
                                 const std::string& reason) {
  FailureRecord record{kind, culprit, reporter, 0, now_ns(), operation, {}};
  std::snprintf(record.reason, sizeof(record.reason), "%s", reason.c_str());
  return record;
}

class FirstFailure {
 public:
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }
  // Whether it is the first. Then `tell` is called before any thread can see it.
  template <class Tell>
  bool set(Failure failure, Tell&& tell) {
    return if_none([&] {
      failure_ = std::move(failure);
      tell();
      is_set_.store(true, std::memory_order_release);
    });
  }
  // Whether there is none; if so, none comes during `call`.
  template <class Call>
  bool if_none(Call&& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_set()) {
      return false;
    }
    call();
    return true;
  }
  Failure get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  [[noreturn]] void raise() const {
    acknowledge();
    const Failure first = get();
    throw_as(first.record.kind, first.message);
  }
  // What raise() throws.
  std::exception_ptr exception() const {
    try {
      raise();
    } catch (...) {
      return std::current_exception();
    }
  }
  void check() const {
    if (is_set()) {
      raise();
    }
  }
  void acknowledge() const { acknowledged_.store(true, std::memory_order_relaxed); }
  bool is_unacknowledged() const {
    return is_set() && !acknowledged_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<bool> is_set_{false};
  mutable std::atomic<bool> acknowledged_{false};
  mutable std::mutex mutex_;
  Failure failure_;
};

}  // namespace dpcore
