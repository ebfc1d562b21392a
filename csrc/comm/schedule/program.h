// A schedule as one rank executes it.
//
// Moves of different chunks never touch each other, so a rank's part of a schedule falls apart
// into one *lane* per chunk: the steps in which this rank sends that chunk on or receives into
// it. Large chunks are cut into segments, each with a run of its lane of its own; all of them
// advance independently, which is what pipelines a ring.
//
// Each rank works through the chunks in its own order, the one in which it first sends them: so the
// list of moves also says whose card is busy when.
//
// In one lane step all sends leave first, then what arrives is taken: a value that is exchanged
// is sent as it was before the step. One arriving contribution is reduced straight from the
// transport's memory; several are collected and reduced at once in rank order.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/reduce/reduce.h"
#include "comm/schedule/schedule.h"
#include "comm/transport/transport.h"

namespace dpcore {

struct LaneStep {
  int step = 0;
  std::vector<int> sends;     // to these ranks
  std::vector<int> receives;  // from these ranks, ascending
  bool reduces = false;
  bool completes = false;  // after it the chunk holds every contribution: scale here
};

struct Program {
  Schedule schedule;
  uint64_t hash = 0;      // of the moves: what ranks compare
  uint64_t identity = 0;  // of moves and name: what traces tell them apart by
  int rank = 0;
  std::vector<std::vector<LaneStep>> lanes;  // by chunk
  std::vector<int> order;  // of the chunks: those it sends, as it does; those it receives; others
  bool receives(int chunk) const;
};

// All chunks, in the order of Program::order.
std::vector<int> order_of_chunks(const Schedule& schedule, int rank);

// Checks the schedule and cuts out one rank's part.
std::shared_ptr<const Program> compile(const Schedule& schedule, int rank);

// Where a chunk lies on this rank while the program runs.
struct ChunkPlace {
  const std::byte* initial = nullptr;  // copied to home at the start, when it is elsewhere
  std::byte* home = nullptr;
  size_t elements = 0;
};

// One execution of a program. Driven by step(); keeps its memory for the next execution.
class ProgramRun {
 public:
  struct Task {
    const Program* program = nullptr;
    Transport* transport = nullptr;
    uint64_t operation = 0;  // tag of all messages
    int priority = 0;        // of all messages
    // Of all contributions. Its factors are by rank, where contributions are added all at once;
    // what makes a sum a mean goes with the addition that completes it.
    ReduceSpec reduction{.dtype = DType::u8};
    double prescale = 1.0;  // of this rank's contribution, at the start
  };

  // `places` has one entry per chunk of the schedule; entries without lanes are ignored.
  void start(const Task& task, std::vector<ChunkPlace>& places);
  // Does what can be done; false when nothing could.
  bool step();
  bool done() const { return finished_ == jobs_.size(); }
  // A rank that must still send us something, or take something, or -1.
  int waiting_for() const;
  size_t bytes_sent() const { return sent_; }
  size_t bytes_received() const { return received_; }

 private:
  struct Job {  // one lane for one segment
    int chunk = 0;
    size_t begin = 0;  // elements within the chunk
    size_t end = 0;
  };
  struct Running {
    size_t job = 0;
    size_t at = 0;  // index in the lane
    bool finished = false;
    std::vector<size_t> sent;
    std::vector<size_t> received;
    std::vector<std::byte> gathered;  // contributions that are reduced together
  };

  void begin_next(Running& running);
  void reset_progress(Running& running);
  bool advance(Running& running);
  bool send_all(Running& running, const LaneStep& step, std::byte* home, size_t bytes);
  bool receive_all(Running& running, const LaneStep& step, std::byte* home, size_t bytes);
  void reduce_gathered(Running& running, const LaneStep& step, std::byte* home, size_t bytes);
  void reduce_operands(const LaneStep& step, std::byte* out, size_t bytes);
  void add_operand(const void* data, int rank);
  MessageTag tag_of(const Running& running, const LaneStep& step) const;

  Task task_;
  size_t element_ = 1;
  size_t segment_ = 1;  // elements
  int steps_ = 1;
  std::vector<ChunkPlace> places_;
  std::vector<Job> jobs_;
  std::vector<Running> window_;
  size_t next_job_ = 0;
  size_t finished_ = 0;
  size_t sent_ = 0;
  size_t received_ = 0;
  bool moved_ = false;
  std::vector<const void*> operands_;
  std::vector<double> operand_factors_;
};

}  // namespace dpcore
