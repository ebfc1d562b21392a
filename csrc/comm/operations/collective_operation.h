// A collective in flight on one rank.
//
// Its life: wait until its slot is free, publish the fingerprint (post), wait until every rank
// has posted, compare, choose the path, run the path's body, tell that it is finished. The
// bodies are coroutines: straight-line code in which each co_await names what it waits for,
// resumed by the engine. Their frames lie in memory that the operation keeps, and operations
// are pooled, so nothing is allocated after the first time.
//
// Which path runs is decided from what all ranks have posted, so all decide alike:
//   alone          world of one
//   two_shot/push  all_reduce, every buffer in an arena: each rank reduces its slice straight
//                  from all inputs into all outputs. 2*S bytes per rank, the floor.
//   direct/pull    every input that is read lies in an arena: read it there
//   direct/read    ordinary memory that the others may read, where that is faster than the stage
//   direct/push    every output that is written lies in an arena: write it there
//   direct/shared  both, one root and many bytes: the root copies a part, the others the rest
//   one_shot/stage, direct/stage      small, or ordinary memory: copied into the stage chunk by
//                  chunk, reduced or copied out of the peers' stages by whoever needs it
//   two_shot/stage all_reduce of ordinary memory: two_shot/push on the stages, between copies
//   moves          the list of a schedule, executed literally over the transport; between ranks
//                  that share no memory everything that is not small
#pragma once

#include <coroutine>
#include <exception>
#include <memory>
#include <vector>

#include "comm/collective/path.h"
#include "comm/collective/pieces.h"
#include "comm/collective/request.h"
#include "comm/engine/operation.h"
#include "comm/operations/executor.h"
#include "comm/operations/shared_state.h"
#include "comm/reduce/reduce.h"
#include "comm/schedule/program.h"

namespace dpcore {

class CollectiveOperation final : public Operation {
 public:
  void prepare(const std::shared_ptr<SharedState>& shared, Request&& request, uint64_t number,
               const std::atomic<uint32_t>* in_flight);

  Progress advance() override;
  WaitPoint waiting() const override { return {awaited_.name, awaited_.next}; }
  std::string describe() const override;
  const char* trace_name() const override;
  uint64_t trace_bytes() const override { return bytes_; }
  uint64_t trace_number() const override { return number_; }
  void tell_what_ran(TraceEvent& event) const override;
  bool needs(int r) const override;
  std::string who_is_late() const override;
  int first_late() const override;
  bool relieve() override;
  int64_t next_event_ns() const override;
  bool is_held_back(int r) override;
  void retire() override;

  ~CollectiveOperation() override;

  // Whether the operation is so small that its data travels in the frame that announces entry.
  static bool is_small(const Request& request, int world);
  // Bytes in the whole buffer, or in all ranks' parts together.
  static size_t bytes_of(const Request& request, int world);
  // Up to here an all-reduce goes through the stage at once even when it lies in an arena: one
  // wait instead of two.
  static constexpr size_t kSmallBytes = 16384;

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
      static void* operator new(size_t bytes, CollectiveOperation& owner) {
        return owner.frame_memory(bytes);
      }
      static void operator delete(void*) {}
    };
    std::coroutine_handle<promise_type> handle;
  };

 private:
  using Counter = std::atomic<uint64_t> OperationSlot::*;

  // From here on outputs that are not read again bypass the cache.
  static constexpr size_t kStreamingBytes = size_t{4} << 20;
  // From here on the ranks of a rooted collective share the copying.
  static constexpr size_t kSharedBytes = size_t{64} << 10;
  // Unit of work between two looks at other operations.
  static constexpr size_t kSegmentBytes = size_t{256} << 10;
  // A waiting rank that has not looked up for so long is stopped (it looks every 20 ms).
  static constexpr int64_t kSilenceNs = 200'000'000;
  // A counter that no chunk will ever exceed.
  static constexpr uint64_t kNoMore = ~uint64_t{0};
  // What stands between the operation and its next step: a counter of one peer or of all.
  struct Awaited {
    const char* name = "start";
    Counter counter = nullptr;
    uint64_t value = 0;
    int next = 0;
    int end = 0;
    bool (*custom)(CollectiveOperation&) = nullptr;
  };
  struct Until {
    CollectiveOperation& operation;
    bool await_ready() const { return operation.poll(); }
    void await_suspend(std::coroutine_handle<>) const {}
    void await_resume() const {}
  };
  // Lets a more urgent operation go first, when there is another one at all.
  struct Pause {
    CollectiveOperation& operation;
    bool await_ready() const { return !operation.others_in_flight(); }
    void await_suspend(std::coroutine_handle<>) const {}
    void await_resume() const {}
  };
  struct ByteRange {
    size_t begin = 0;
    size_t end = 0;
  };
  enum class Phase { stage_free, slot_free, posted, body };

  void* frame_memory(size_t bytes);
  bool poll();
  void await_stage();
  bool is_stage_free();
  bool is_slot_free();
  void await_all(const char* name, Counter counter, uint64_t value);
  Until until_all(const char* name, Counter counter, uint64_t value);
  // On an emulated link the word that the last rank has entered takes its time as well.
  Until until_entry_has_travelled();
  Pause pause() {
    awaited_ = {};  // nothing stands in the way of going on
    return {*this};
  }
  bool others_in_flight() const;

  void post();
  void tell_remote_members();
  void check_fingerprints(uint64_t number) const;
  void check_what_was_given(bool wherever_possible) const;
  Path choose_path() const;
  void start_body();
  void finish(bool ring = true);
  void finish_at_entry();

  // The geometry of the exchange (comm/collective/pieces.h), as this rank sees it.
  Piece outgoing(int to) const { return dpcore::outgoing(request_, me(), to); }
  Piece incoming(int from) const { return dpcore::incoming(request_, me(), from); }
  bool publishes(int r) const { return dpcore::publishes(request_, r); }
  bool publishes() const { return publishes(me()); }
  bool consumes(int r) const { return dpcore::consumes(request_, r); }
  bool consumes() const { return consumes(me()); }
  bool same_piece_for_all() const { return dpcore::same_piece_for_all(request_.collective); }
  bool reduces() const { return dpcore::reduces(request_.collective); }
  bool has_root() const { return dpcore::has_root(request_.collective); }

  ReduceSpec reduce_spec(bool streaming);
  size_t stage_quota() const;
  size_t two_shot_quota() const;
  std::byte* stage_buffer(int r, size_t chunk, int piece, size_t quota) const;
  void fill_stage(size_t chunk, size_t quota);
  void consume_stage(size_t chunk, size_t quota);
  void copy_other_slices(size_t chunk, size_t quota, std::byte* buffer, bool into_stage);
  void copy_own_piece();
  ByteRange own_share(size_t bytes, bool giving) const;
  void check_announced_parts() const;

  Steps run_alone();
  Steps run_barrier_over_link();
  Steps run_two_shot_push();
  Steps run_reducing_pull();
  Steps run_copies();
  Steps run_read();
  Steps run_stage();
  Steps run_two_shot_stage();
  Steps run_moves();

  void count_traffic(size_t read, size_t written);

  int me() const { return group_->rank(); }
  int world() const { return group_->world(); }
  OperationSlot& own_slot() const { return group_->slot(me(), number_); }
  OperationSlot& slot(int r) const { return group_->slot(r, number_); }
  const std::byte* input_of(int r) const { return group_->base(r) + slot(r).input_offset; }
  std::byte* output_of(int r) const { return group_->base(r) + slot(r).output_offset; }
  std::byte* stage_of(int r) const { return group_->base(r) + slot(r).stage_offset; }

  std::shared_ptr<SharedState> shared_;
  Request request_;
  uint64_t number_ = 0;
  size_t element_ = 1;
  size_t bytes_ = 0;
  bool announces_parts_ = false;  // uneven all_to_all: the stage begins with a list of sizes
  bool is_small_ = false;         // one chunk through the stage
  bool is_tiny_ = false;          // small, and the slot has room for it: needs no stage
  bool ends_at_entry_ = false;    // nothing is left to do once every rank has entered
  bool only_gives_ = false;       // small, and nothing comes back: over as soon as it is posted
  // The first chunk of the stage is filled before the post when it is certain to be needed: the
  // wait for everybody's entry is then the wait for the data as well.
  bool is_prefilled_ = false;
  Fingerprint fingerprint_;
  Phase phase_ = Phase::slot_free;
  Path path_ = Path::automatic;
  Awaited awaited_;
  int unread_owner_ = -1;  // whose memory can't be read any more: its death or failure ends this
  int64_t entry_seen_ns_ = 0;
  Steps body_{};
  std::unique_ptr<std::byte[]> frame_;
  size_t frame_bytes_ = 0;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<double> factors_;
  std::vector<ChunkMemory> chunk_memory_;
  std::vector<std::byte> scratch_;
  ProgramRun run_;
  const std::atomic<uint32_t>* in_flight_ = nullptr;  // of the engine
};

}  // namespace dpcore
