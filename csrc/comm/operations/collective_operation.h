// A collective in flight on one rank.
//
// Its life: wait until its slot is free, publish the fingerprint (post), wait until every rank
// has posted, compare, choose the path (collective/path.h), run the path's body (path_run.h),
// tell that it is finished. A small one is over when all have posted, without a body; where only
// the root gives something, as soon as the root has, and the others are compared later. One that
// follows another operation begins its body after that one's end; it posts before, where peers get
// nothing but what the body sends. Operations are pooled, so nothing is allocated after the first
// time.
#pragma once

#include <cstdint>

#include "comm/operations/path_run.h"
#include "comm/operations/shared_state.h"

namespace dpcore {

class CollectiveOperation final : public Operation {
 public:
  void prepare(const std::shared_ptr<SharedState>& shared, Request&& request, uint64_t number,
               const std::atomic<uint32_t>* in_flight);
  // Before submission. `earlier` has the smaller number, so ranks never wait in a circle.
  void follow(std::shared_ptr<const Operation> earlier) { run_.earlier = std::move(earlier); }

  Progress advance() override;
  WaitPoint waiting() const override { return {run_.awaited.name, run_.awaited.next}; }
  std::string describe() const override;
  MemoryUse memory_use() const override {
    return dpcore::memory_use(run_.request, run_.me(), run_.world());
  }
  const char* trace_name() const override;
  uint64_t trace_bytes() const override { return run_.bytes; }
  uint64_t trace_number() const override { return run_.number; }
  uint64_t place_in_group() const override { return run_.number + 1; }
  void tell_what_ran(TraceEvent& event) const override;
  bool needs(int r) const override;
  std::string describe_late_ranks() const override;
  int first_late() const override;
  bool relieve() override;
  int64_t next_event_ns() const override;
  bool is_held_back(int r) override;
  NotFinite not_finite() const override { return run_.not_finite; }
  void retire() override;

  ~CollectiveOperation() override;

 private:
  enum class Phase { slot_free, earlier_over, stage_free, posted, all_entered, body };

  void post();
  void show_buffers(OperationSlot& slot);
  bool waits_for(int r) const;
  void check_fingerprints(uint64_t number) const;
  void check_what_is_over(bool wherever_possible) const;
  void hear_words();
  bool adopt_if_given_up();
  void start_body();
  void finish_at_entry();
  void ring_at_entry();

  std::shared_ptr<SharedState> shared_;
  PathRun run_{*this};
  Fingerprint fingerprint_;
  Phase phase_ = Phase::slot_free;
  bool ends_at_entry_ = false;  // nothing is left to do once every rank has entered
  bool only_gives_ = false;     // small, and nothing comes back: over as soon as it is posted
  bool only_takes_ = false;     // small, and all comes from the root: over when that has posted
  // The first chunk of the stage is filled before the post when it is certain to be needed: the
  // wait for all ranks to enter is then the wait for the data as well.
  bool is_prefilled_ = false;
  PathRun::Steps body_{};
};

// An operation that was over here before the other ranks had entered it is compared with theirs by
// a later operation, or else by this, with the ranks that have entered it by now. One that enters
// it later finds this rank's call when it leaves itself. To be called when nothing is in flight;
// the group fails where they differ.
void compare_last_calls(SharedState& shared);

}  // namespace dpcore
