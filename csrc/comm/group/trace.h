// A recorder of what happened when: a fixed ring of events per endpoint.
//
// Memory: one array, allocated when recording starts, owned by the recorder; threads claim
// slots by an atomic counter and write them without a lock. When the ring is full the oldest
// events are overwritten and counted as dropped. Names are string literals: nothing is copied.
// While recording is off an event costs one relaxed load. Lists of moves that operations ran are
// kept beside the ring, as many as fit, each list once.
//
// start() and stop() may be called at any time, by one thread: add() and keep() count themselves in
// before they look again whether recording is on, and stop() waits until no writer is counted in.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/schedule/schedule.h"

namespace dpcore {

// operation: from submission to completion. wait: an operation stood still, named by what it
// waited for. exposed: a caller sat in a synchronous call or in Work.wait(). ready, launch: a
// gradient came out of backward, a bucket of them was sent (`operation` is its number). compute:
// forward and backward of a model.
enum class EventKind : uint8_t { operation, wait, exposed, mark, ready, launch, compute };

struct TraceEvent {
  const char* name = "";
  EventKind kind = EventKind::mark;
  int32_t peer = -1;
  uint32_t thread = 0;
  uint64_t operation = 0;
  uint64_t bytes = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  // What an operation ran, "" where that is not known: the schedule and how its data travelled, as
  // in stats() ("two_shot/push"), or "moves" for a list of moves: `schedule` says which.
  const char* path = "";
  uint64_t schedule = 0;  // Program::identity; 0: no list
  int32_t root = -1;      // of collectives that have one
  int32_t world = 0;      // of the operation's communicator, which may be a group
};

class TraceRecorder {
 public:
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  void start(size_t capacity);
  // Stops and returns the events in order of time; `dropped` counts those overwritten.
  std::vector<TraceEvent> stop(uint64_t* dropped);
  void add(const TraceEvent& event);

  // The list of moves that events name by `identity`. Takes no lock and no memory; where all
  // entries are taken the list is not kept.
  void keep(uint64_t identity, const std::shared_ptr<const Schedule>& schedule);
  // After stop(): what was kept, which is let go of.
  std::vector<std::pair<uint64_t, std::shared_ptr<const Schedule>>> take_schedules();

 private:
  static constexpr size_t kMostSchedules = 64;
  struct Kept {
    std::atomic<uint64_t> identity{0};  // the thread that sets it writes the schedule
    std::shared_ptr<const Schedule> schedule;
  };

  void wait_for_writers() const;

  std::atomic<bool> recording_{false};
  std::atomic<uint32_t> writers_{0};
  std::atomic<uint64_t> next_{0};
  std::unique_ptr<TraceEvent[]> ring_;
  size_t capacity_ = 0;
  std::array<Kept, kMostSchedules> kept_;
};

}  // namespace dpcore
