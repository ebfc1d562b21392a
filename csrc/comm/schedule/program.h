// A schedule as one rank executes it.
//
// Moves of different chunks never touch each other, so a rank's part of a schedule falls apart
// into one *lane* per chunk: the steps in which this rank sends that chunk on or receives into
// it. Each rank works through the chunks in its own order, the one in which it first sends them: so
// the list of moves also says whose NIC is busy when.
//
// Where in a step each rank sends to several, ranks that send to the same one take turns, or else
// some NICs would idle while others are asked twice. So the k-th message of a rank waits for the
// one that comes here as the (k-1)-th of its sender, and the first for the last of some segments
// ago. No message says whose turn it is: what has arrived does. Messages of an urgent operation
// begin a little earlier (Transport::early_bytes).
//
// Values only; comm/operations/executor.h runs a program.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "comm/base/error.h"
#include "comm/reduce/not_finite.h"
#include "comm/schedule/check.h"
#include "comm/schedule/schedule.h"

namespace dpcore {

struct Turn {       // has come when this has been received, in the same step
  int source = -1;  // or none: it is there from the beginning
  int chunk = -1;
  size_t segments_ago = 0;
  bool operator==(const Turn&) const = default;
};

struct LaneStep {
  int step = 0;
  std::vector<int> sends;     // to these ranks
  std::vector<Turn> turns;    // of these messages
  std::vector<int> receives;  // from these ranks, ascending
  bool reduces = false;
  bool completes = false;  // after it the chunk holds every contribution: scale here
  // Of a step that reduces, in rank order: the rank whose contribution the operand is, or
  // FiniteCheck::kSum of one that has been added to before.
  std::vector<int> operands;
};

// The operands of a step in the order in which they are added, that of their ranks: calls own()
// once and received(i) for each of step.receives.
template <class Own, class Received>
void in_rank_order(const LaneStep& step, int rank, Own own, Received received) {
  size_t i = 0;
  for (; i < step.receives.size() && step.receives[i] < rank; ++i) {
    received(i);
  }
  own();
  for (; i < step.receives.size(); ++i) {
    received(i);
  }
}

struct Program {
  Schedule schedule;
  uint64_t hash = 0;      // of the moves: what ranks compare
  uint64_t identity = 0;  // of moves and name: what traces tell them apart by
  int rank = 0;
  std::vector<std::vector<LaneStep>> lanes;  // by chunk
  bool has_turns = false;                    // of any message
  std::vector<int> order;  // of the chunks: those it sends, as it does; those it receives; others
  bool receives(int chunk) const;
};

// What a call asks for: an algorithm by its name, "" being the communicator's own; or a list of
// moves of the program's, which then has the name.
struct CallAlgorithm {
  std::string name;
  std::shared_ptr<const Program> program = nullptr;
};

// Throws Unsupported when the list of moves is for another collective, root or number of ranks.
void check_fits(const Schedule& schedule, Collective collective, int root, int world);

// All chunks, in the order of Program::order.
std::vector<int> order_of_chunks(const Schedule& schedule, int rank);

// Checks the schedule and cuts out one rank's part.
std::shared_ptr<const Program> compile(const Schedule& schedule, int rank);

// Where a chunk lies on this rank while the program runs.
struct ChunkMemory {
  const std::byte* initial = nullptr;  // copied to home at the start, when it is elsewhere
  std::byte* home = nullptr;
  size_t elements = 0;
};

class ProgramCache {
 public:
  // `hosts`: as for make_schedule().
  ProgramCache(int rank, int world, std::vector<int> hosts, bool deterministic)
      : rank_(rank), world_(world), hosts_(std::move(hosts)), deterministic_(deterministic) {}

  // Throws Unsupported when the collective has no such algorithm.
  const std::shared_ptr<const Program>& of(const std::string& algorithm, Collective collective,
                                           int root) {
    auto& program = programs_[{algorithm, collective, root}];
    if (!program) {
      program = compile(make_schedule(algorithm, collective, world_, root, hosts_), rank_);
    }
    return program;
  }
  // Lets calls that name no algorithm run this schedule of the program's, where it is for them.
  void use_own(const Schedule& schedule) {
    check_fits(schedule, schedule.collective, schedule.root, world_);
    check_deterministic(schedule);
    own_ = compile(schedule, rank_);
  }
  // The one for a call of this collective and root; null: none.
  std::shared_ptr<const Program> own_for(Collective collective, int root) const {
    const bool fits =
        own_ && own_->schedule.collective == collective && own_->schedule.root == root;
    return fits ? own_ : nullptr;
  }
  // Throws Unsupported when results must not depend on the layout, always or in an `ordered`
  // operation, and those of the schedule do.
  void check_deterministic(const Schedule& schedule, bool ordered = false) const {
    if ((deterministic_ || ordered) && !schedule.ordered && !is_ordered(schedule)) {
      throw Unsupported("algorithm '" + schedule.algorithm +
                        "' adds in an order that depends on the layout; deterministic=True allows "
                        "one_shot, two_shot and direct");
    }
  }

 private:
  int rank_;
  int world_;
  std::vector<int> hosts_;
  bool deterministic_;
  std::map<std::tuple<std::string, Collective, int>, std::shared_ptr<const Program>> programs_;
  std::shared_ptr<const Program> own_;
};

}  // namespace dpcore
