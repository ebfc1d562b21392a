// One rank's run of a program over a transport.
//
// Large chunks are cut into segments, each with a run of its lane of its own; all of them advance
// independently, which is what pipelines a ring.
//
// In one lane step all sends leave first, then what arrives is taken: a value that is exchanged
// is sent as it was before the step. One arriving contribution is reduced straight from the
// transport's memory; several are collected and reduced at once in rank order.
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
    std::vector<bool> pushed;  // the transport knows of it
    std::vector<size_t> received;
    std::vector<std::byte> gathered;  // contributions that are reduced together
  };

  void begin_next(Running& running);
  void reset_progress(Running& running);
  bool advance(Running& running);
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
  size_t sent_ = 0;
  size_t received_ = 0;
  bool moved_ = false;
  uint64_t seen_changes_ = 0;  // of the transport
  bool holds_back_ = false;  // the transport, all that it knows of
  std::vector<const void*> operands_;
  std::vector<double> operand_factors_;
};

}  // namespace dpcore
