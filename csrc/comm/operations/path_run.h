// What the body of a path sees of its operation: the request, the slots of all ranks, and how to
// wait. The operation keeps it, and uses it again for the next request.
//
// A body is a coroutine on a PathRun: straight-line code in which each co_await names
// what it waits for, resumed by the engine. Its frame lies in memory that is kept here, so nothing
// is allocated after the first time.
#pragma once

#include <coroutine>
#include <exception>
#include <memory>
#include <vector>

#include "comm/base/fault.h"
#include "comm/collective/geometry.h"
#include "comm/collective/path.h"
#include "comm/engine/operation.h"
#include "comm/operations/executor.h"
#include "comm/operations/shared_state.h"
#include "comm/reduce/reduce.h"

namespace dpcore {

struct PathRun {
  explicit PathRun(const Operation& of) : operation(of) {}
  PathRun(const PathRun&) = delete;
  PathRun& operator=(const PathRun&) = delete;

  // Unit of work between two polls of other operations.
  static constexpr size_t kSegmentBytes = size_t{256} << 10;
  // A counter that no chunk will ever exceed.
  static constexpr uint64_t kNoMore = ~uint64_t{0};

  using Counter = std::atomic<uint64_t> OperationSlot::*;
  using Question = bool (*)(PathRun&);
  // What stands between the operation and its next step: a counter of one peer or of all, or a
  // question.
  struct Awaited {
    const char* name = "start";
    Counter counter = nullptr;
    uint64_t value = 0;
    int next = 0;
    int end = 0;
    Question question = nullptr;
  };
  struct Until {
    PathRun& run;
    bool await_ready() const { return run.poll(); }
    void await_suspend(std::coroutine_handle<>) const {}
    void await_resume() const {}
  };
  // Lets a more urgent operation go first, when there is another one at all.
  struct Pause {
    PathRun& run;
    bool await_ready() const { return !run.others_in_flight(); }
    void await_suspend(std::coroutine_handle<>) const {}
    void await_resume() const {}
  };
  // The coroutine of a body.
  struct Steps {
    struct promise_type {
      std::exception_ptr problem;
      Steps get_return_object() {
        return {std::coroutine_handle<promise_type>::from_promise(*this)};
      }
      std::suspend_always initial_suspend() noexcept { return {}; }
      std::suspend_always final_suspend() noexcept { return {}; }
      void return_void() {}
      void unhandled_exception() { problem = std::current_exception(); }
      static void* operator new(size_t bytes, PathRun& run) { return run.frame_memory(bytes); }
      static void operator delete(void*) {}
    };
    std::coroutine_handle<promise_type> handle;
  };

  // ---- waiting
  bool poll();  // whether nothing stands in the way any more
  void await_all(const char* name, Counter counter, uint64_t value) {
    awaited = {name, counter, value, 0, world(), nullptr};
  }
  void await_one(const char* name, Counter counter, uint64_t value, int peer) {
    awaited = {name, counter, value, peer, peer + 1, nullptr};
  }
  void await(const char* name, Question question, int peer = 0) {
    awaited = {name, nullptr, 0, peer, 0, question};
  }
  void await_stage();
  void await_slot();
  void await_earlier();
  Until until_all(const char* name, Counter counter, uint64_t value) {
    await_all(name, counter, value);
    return {*this};
  }
  Until until_finished(const char* name) {
    return until_all(name, &OperationSlot::finished, number + 1);
  }
  Until until(const char* name, Question question, int peer = 0) {
    await(name, question, peer);
    return {*this};
  }
  Until until_stage_is_free() {
    await_stage();
    return {*this};
  }
  Pause pause() {
    awaited = {};  // nothing stands in the way of going on
    return {*this};
  }
  bool others_in_flight() const {
    return in_flight->load(std::memory_order_relaxed) > operation.counted;
  }

  // ---- the ranks and their memory
  int me() const { return group->rank(); }
  int world() const { return group->world(); }
  OperationSlot& own_slot() const { return group->slot(me(), number); }
  OperationSlot& slot(int r) const { return group->slot(r, number); }
  const std::byte* input_of(int r) const { return group->at(r, slot(r).input_offset); }
  std::byte* output_of(int r) const { return group->at(r, slot(r).output_offset); }
  std::byte* stage_of(int r) const { return group->at(r, slot(r).stage_offset); }

  // ---- geometry (comm/collective), as this rank sees it
  Piece outgoing(int to) const { return dpcore::outgoing(request, me(), to); }
  Piece incoming(int from) const { return dpcore::incoming(request, me(), from); }
  bool publishes(int r) const { return dpcore::publishes(request, r); }
  bool publishes() const { return publishes(me()); }
  bool consumes(int r) const { return dpcore::consumes(request, r); }
  bool consumes() const { return consumes(me()); }
  // Whether a rank sends the same piece to all that need it.
  bool same_piece_for_all() const { return !splits(request.collective); }
  bool reduces() const { return dpcore::reduces(request.collective); }
  bool has_root() const { return dpcore::has_root(request.collective); }
  StageLayout stage_layout() const {
    const size_t pieces = same_piece_for_all() ? 1 : static_cast<size_t>(world());
    return {element, bytes, pieces, announces_parts};
  }
  // A small one is one chunk, as large as the largest part: a division would be a good part of what
  // it costs.
  size_t stage_quota() const { return is_small ? request.count : stage_layout().quota(); }
  // Where rank r's piece for `reader` lies in its stage, or in its slot.
  std::byte* stage_buffer(int r, size_t chunk, int reader, size_t quota) const;

  // ---- what all paths do
  // `first_element`: of what is added first, in the whole buffer.
  ReduceSpec reduce_spec(uint64_t first_element = 0);
  std::byte* take_stage();  // after until_stage_is_free()
  void count_traffic(size_t read, size_t written);
  void count_staged_traffic();
  // Whether the owner still keeps its input for ranks that read it.
  bool keeps_its_input(int owner) const;
  // Of those that this rank has read: one that has given up, and may have changed it meanwhile; -1.
  int owner_that_gave_up() const;
  // The death or failure of this rank, whose memory can't be read any more, ends the operation.
  void await_end_of(int owner);
  // This rank no longer accesses its peers' memory for the operation.
  void finish(bool ring = true);
  // When all have finished: what they have found, in lines that this rank has just read. Slots are
  // used again kSlotsKept operations later.
  void learn_not_finite();

  const Operation& operation;
  Group* group = nullptr;
  SharedState* shared = nullptr;
  const std::atomic<uint32_t>* in_flight = nullptr;  // of the engine
  Request request;
  uint64_t number = 0;
  size_t element = 1;
  size_t bytes = 0;
  bool announces_parts = false;  // uneven all_to_all: the stage begins with a list of sizes
  bool is_small = false;         // one chunk through the stage
  bool is_tiny = false;          // small, and the slot has room for it: needs no stage
  Path path = Path::automatic;
  Awaited awaited;
  NotFinite not_finite;       // among what this rank has added
  int unread_owner = -1;      // whose memory can't be read any more: its death or failure ends this
  int64_t entry_seen_ns = 0;  // when an emulated link lets the word of the last entry through
  std::shared_ptr<const Operation> earlier;  // of this rank: makes what this one sends; or none

  // Kept for the next request:
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  struct Moves {
    std::vector<ChunkMemory> memory;
    std::vector<std::byte> scratch;
    ProgramRun run;
  };
  Moves moves;

 private:
  bool is_slot_free();
  bool is_stage_free();
  void* frame_memory(size_t size);

  std::vector<double> factors_;
  std::unique_ptr<std::byte[]> frame_;
  size_t frame_bytes_ = 0;
};

// ---- inline: all that a small operation passes

inline std::byte* PathRun::stage_buffer(int r, size_t chunk, int reader, size_t quota) const {
  const size_t piece = same_piece_for_all() ? 0 : static_cast<size_t>(reader);
  return is_tiny ? slot(r).tiny + piece * request.count * element
                 : stage_of(r) + stage_layout().offset(chunk, piece, quota);
}

inline ReduceSpec PathRun::reduce_spec(uint64_t first_element) {
  ReduceSpec spec = reduction_over(world(), request.op, request.dtype);
  if (request.finds_not_finite) {
    spec.check = {.found = &not_finite, .first_element = first_element};
  }
  if (request.op == ReduceOp::premul_sum) {
    factors_.resize(world());
    for (int r = 0; r < world(); ++r) {
      factors_[r] = slot(r).prescale;
    }
    spec.pre = factors_.data();
  }
  return spec;
}

inline void PathRun::count_traffic(size_t read, size_t written) {
  PathCounters& counters = shared->counters(request.collective, path);
  const auto add = [](std::atomic<uint64_t>& counter,
                      uint64_t more) {  // one writer: the lock's holder
    counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  };
  add(counters.operations, 1);
  add(counters.bytes, bytes);
  add(counters.peer_reads, read);
  add(counters.peer_writes, written);
}

inline void PathRun::count_staged_traffic() {
  count_traffic(received_elements(request, me(), world()) * element,
                staged_elements(request, me(), world()) * element);
}

inline void PathRun::finish(bool ring) {
  fault::reach(fault::Point::exit, me(), number);
  if (request.finds_not_finite) {
    own_slot().not_finite = not_finite;
  }
  group->finish_operation(number);
  // A rank that only sends may be ahead: the others still read what it would take away from them.
  const bool fills_again = is_small && !is_tiny && publishes() && consumes();
  shared->fetch_for_writing(number + 1, fills_again ? bytes : 0);
  if (ring) {
    group->ring_others();
  }
}

// ---- the bodies; collective/path.h says when which one is run

using Steps = PathRun::Steps;

// path_mapped.cpp: data that every rank can reach
Steps run_alone(PathRun& run);
Steps run_two_shot_push(PathRun& run);
Steps run_reducing_pull(PathRun& run);
Steps run_copies(PathRun& run);  // pull, push, shared
// path_read.cpp, path_stage.cpp: ordinary memory
Steps run_read(PathRun& run);
Steps run_stage(PathRun& run);
Steps run_two_shot_stage(PathRun& run);
// path_moves.cpp
Steps run_moves(PathRun& run);
Steps run_barrier_over_link(PathRun& run);

// What several of them do, and small operations without any of them.

// The part of the data that does not travel: own input to own output.
void copy_own_piece(PathRun& run);
// One chunk into the own stage, and out of the stages of the others.
void fill_stage(PathRun& run, size_t chunk, size_t quota);
void consume_stage(PathRun& run, size_t chunk, size_t quota);
// Throws Mismatch unless a rank sends as many elements as this one expects of it.
void check_part(const PathRun& run, int from, uint64_t sent);
// The same of all, as they announced it at the front of their stages.
void check_announced_parts(const PathRun& run);
// `is_prefilled`: the stage has something for them.
void tell_remote_members(const PathRun& run, bool is_prefilled);

}  // namespace dpcore
