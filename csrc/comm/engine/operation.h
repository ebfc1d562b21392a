// One operation in flight, whatever it does: the unit that the engine drives.
//
// An operation never waits by itself. advance() does what can be done now, at most about one
// segment of work, and says whether it stands still, went on, or is complete. While it stands
// still, waiting() names what it waits for and whom, for errors and for the trace.
//
// Threads: advance() is called under the engine's progress lock only. `status` is the one field
// that other threads read; it is stored with release after everything else.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/collective/geometry.h"
#include "comm/group/group.h"
#include "comm/reduce/not_finite.h"

namespace dpcore {

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  enum class Progress { blocked, advanced, finished };
  enum Status : uint32_t { idle, pending, done, failed };

  struct WaitPoint {
    const char* name = "start";
    int peer = -1;
  };

  Operation() = default;
  virtual ~Operation() { delete callback_.load(); }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  virtual Progress advance() = 0;
  virtual WaitPoint waiting() const = 0;
  // "operation 7 (all_reduce of ...)", "send of 4096 bytes to rank 1 (tag 3)".
  virtual std::string describe() const = 0;
  virtual MemoryUse memory_use() const { return {}; }
  virtual const char* trace_name() const = 0;
  virtual uint64_t trace_bytes() const = 0;
  virtual uint64_t trace_number() const = 0;
  // Number + 1 of a collective in its group; 0 of what is none.
  virtual uint64_t place_in_group() const { return 0; }
  // Records in the event of its end what it ran; before retire().
  virtual void tell_what_ran(TraceEvent&) const {}
  // Whether rank r, if it is gone, can still be needed.
  virtual bool needs(int r) const = 0;
  // What the error says when the deadline is over: which ranks are late, and what they did last.
  virtual std::string describe_late_ranks() const = 0;
  virtual int first_late() const = 0;
  // Shows peers what is waited for, where no entry in the history does; now and then, in a wait.
  virtual void show_wait(int64_t) const {}
  // When no operation of the engine can go on: make room, say whether anything changed.
  virtual bool relieve() { return false; }
  // When there is something to do again though nothing has come; INT64_MAX: no such moment.
  virtual int64_t next_event_ns() const { return INT64_MAX; }
  // Whether something that rank r sent, which is gone, may still be held back by an emulated link.
  virtual bool is_held_back(int) { return false; }
  // What was NaN or Inf among the inputs of a sum, if the request asked for it: as far as this rank
  // has seen, once the operation is complete.
  virtual NotFinite not_finite() const { return {}; }
  // Lets go of what the operation holds; called once, by the engine, before the status is set.
  virtual void retire() = 0;

  Group& group() const { return *group_; }

  bool is_complete() const { return status.load(std::memory_order_acquire) >= done; }

  // Called once, by the thread that completes the operation (or at once, when it is complete): it
  // holds the progress lock, so the call must neither wait nor run code of the program, which
  // CallbackThreads are for. One call per operation: another one takes the place of the first.
  void when_complete(std::function<void()> call) {
    delete callback_.exchange(new std::function<void()>(std::move(call)));
    if (is_complete()) {
      run_callback();
    }
  }
  void run_callback() {
    if (callback_.load(std::memory_order_acquire) != nullptr) {
      const std::unique_ptr<std::function<void()>> call(callback_.exchange(nullptr));
      if (call) {
        (*call)();
      }
    }
  }

  std::atomic<uint32_t> status{idle};
  int priority = 0;  // higher goes first
  int64_t deadline_ns = 0;
  double timeout_s = 0;
  // Engine's own:
  bool in_background = false;
  uint32_t counted = 0;  // whether the engine counts it among those in flight
  int64_t begun_ns = 0;  // for the trace
  int64_t over_ns = 0;   // of one in the background, once it is complete; 0 of others
  int64_t blocked_since_ns = 0;
  int missing_peer = -1;  // was gone at the last check, and is needed
  WaitPoint blocked_at;
  Operation* next_submitted = nullptr;
  std::shared_ptr<Operation> self;  // holds it while it is in flight

 protected:
  std::shared_ptr<Group> group_;

 private:
  std::atomic<std::function<void()>*> callback_{nullptr};
};

}  // namespace dpcore
