// One rank's run of a program over a transport.
//
// Large chunks are cut into segments, each with a run of its lane of its own; all of them advance
// independently, which is what pipelines a ring.
//
// In one lane step all sends leave first, then what arrives is taken: a value that is exchanged
// is sent as it was before the step. One arriving contribution is reduced straight from the
// transport's memory; several are collected and reduced at once in rank order.
//
// Of the runs of one communicator, those that run the same program with turns begin to send one
// after the other, each when little of the ones before it is left (RunsInFlight).
//
// Used under the engine's progress lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/reduce/reduce.h"
#include "comm/schedule/program.h"
#include "comm/transport/transport.h"

namespace dpcore {

class RunsInFlight;

// One execution of a program. Driven by step(); keeps its memory for the next execution.
class ProgramRun {
 public:
  struct Task {
    const Program* program = nullptr;
    Transport* transport = nullptr;
    const RunsInFlight* others = nullptr;  // that share it
    uint64_t operation = 0;                // tag of all messages
    int priority = 0;                      // of all messages
    // Of all contributions. Its factors are by rank, where contributions are added all at once;
    // what makes a sum a mean goes with the addition that completes it.
    ReduceSpec reduction{.dtype = DType::u8};
    double prescale = 1.0;             // of this rank's contribution, at the start
    const std::byte* input = nullptr;  // of this rank; its chunks say which elements they are
  };

  // `chunk_memory` has one entry per chunk of the schedule; entries without lanes are ignored.
  void start(const Task& task, std::vector<ChunkMemory>& chunk_memory);
  // Does what can be done; false when nothing could.
  bool step();
  bool done() const { return finished_ == jobs_.size(); }
  // A rank that must still send us something, or take something, or -1.
  int waiting_for() const;
  size_t bytes_left() const { return elements_left_ * element_; }
  const Task& task() const { return task_; }
  size_t bytes_sent() const { return sent_; }
  size_t bytes_received() const { return received_; }

 private:
  struct Job {  // one lane for one segment
    int chunk = 0;
    size_t begin = 0;  // elements within the chunk
    size_t end = 0;
  };
  enum class SendState : uint8_t { unasked, not_its_turn, may_start, known_to_transport };
  struct Running {
    size_t job = 0;
    size_t at = 0;  // index in the lane
    bool finished = false;
    std::vector<size_t> sent;
    std::vector<SendState> states;  // of the messages
    std::vector<size_t> received;
    std::vector<std::byte> gathered;  // contributions that are reduced together
  };

  size_t bytes_of(const Job& job) const { return (job.end - job.begin) * element_; }
  void begin_next(Running& running);
  void reset_progress(Running& running);
  bool advance(Running& running);
  bool may_start(Running& running, const LaneStep& step, size_t send);
  bool is_turn(const Running& running, const LaneStep& step, size_t send) const;
  bool send_all(Running& running, const LaneStep& step, std::byte* home, size_t bytes);
  bool receive_all(Running& running, const LaneStep& step, std::byte* home, size_t bytes);
  void reduce_gathered(Running& running, const LaneStep& step, std::byte* home, size_t bytes);
  void reduce_operands(const Running& running, const LaneStep& step, size_t offset, size_t bytes);
  void add_operand(const void* data, int rank);
  MessageTag tag_of(const Running& running, const LaneStep& step) const;

  Task task_;
  size_t element_ = 1;
  size_t segment_ = 1;  // elements
  int steps_ = 1;
  std::vector<ChunkMemory> chunk_memory_;
  std::vector<Job> jobs_;
  std::vector<Running> window_;
  size_t next_job_ = 0;
  size_t finished_ = 0;
  size_t elements_left_ = 0;  // of the jobs that are not
  size_t sent_ = 0;
  size_t received_ = 0;
  size_t received_before_ = 0;  // the last step
  bool asks_turns_ = true;      // again, of messages that had to wait for theirs
  bool has_begun_ = false;      // to send
  bool moved_ = false;
  uint64_t seen_changes_ = 0;  // of the transport
  bool holds_back_ = false;    // the transport, all that it knows of
  std::vector<const void*> operands_;
  std::vector<double> operand_factors_;
};

// The runs of a communicator, while they last.
class RunsInFlight {
 public:
  class Entry {
   public:
    Entry(RunsInFlight& all, const ProgramRun& run) : all_(all), run_(run) {
      all_.runs_.push_back(&run_);
    }
    ~Entry() { std::erase(all_.runs_, &run_); }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    RunsInFlight& all_;
    const ProgramRun& run_;
  };
  // Whether little enough is left of those with a smaller number, which no rank lets wait for this
  // one: so ranks never wait in a circle.
  bool may_begin(const ProgramRun::Task& task) const;

 private:
  std::vector<const ProgramRun*> runs_;
};

}  // namespace dpcore
