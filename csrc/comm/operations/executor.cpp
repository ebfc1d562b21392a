// Executing the lanes of a program over a transport: the one place where every algorithm runs.
//
// Jobs (a lane for one segment) are started segment by segment, a window of them at a time; within
// a segment each rank takes the chunks in its own order (Program::order). A window has room for
// every chunk, so the lowest segment that is unfinished on any rank lies in every window and
// some rank can always go on; what arrives for jobs outside the window is set aside by the
// transport.
#include "comm/operations/executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/base/clock.h"

namespace dpcore {
namespace {

constexpr size_t kWindowPerChunk = 2;
constexpr size_t kMinWindow = 8;
// So many segments of the runs before it may be left when a run begins to send: decision 79.
constexpr size_t kSegmentsLeft = 12;

}  // namespace

void ProgramRun::start(const Task& task, std::vector<ChunkMemory>& chunk_memory) {
  task_ = task;
  element_ = size_of(task.reduction.dtype);
  chunk_memory_.swap(chunk_memory);
  jobs_.clear();
  next_job_ = finished_ = sent_ = received_ = elements_left_ = 0;
  received_before_ = 0;
  seen_changes_ = 0;
  has_begun_ = !task.program->has_turns || !task.transport->takes_turns();
  const Schedule& schedule = task.program->schedule;
  steps_ = schedule.moves.empty() ? 1 : schedule.moves.back().step + 1;

  segment_ = task.transport->segment_bytes() / element_;
  size_t longest = 0;
  for (const ChunkMemory& chunk_memory : chunk_memory_) {
    longest = std::max(longest, chunk_memory.elements);
  }
  for (size_t begin = 0; begin < longest; begin += segment_) {
    for (const int chunk : task.program->order) {
      const ChunkMemory& chunk_memory = chunk_memory_[chunk];
      const bool concerns_us =
          !task.program->lanes[chunk].empty() || chunk_memory.initial != nullptr;
      if (begin < chunk_memory.elements && concerns_us) {
        jobs_.push_back({chunk, begin, std::min(chunk_memory.elements, begin + segment_)});
        elements_left_ += jobs_.back().end - begin;
      }
    }
  }
  const size_t width = std::max(kMinWindow, kWindowPerChunk * static_cast<size_t>(schedule.chunks));
  const size_t wide_enough =
      std::min(jobs_.size(), task.transport->window_bytes() / task.transport->segment_bytes());
  window_.resize(std::max({window_.size(), width, wide_enough}));
  for (Running& running : window_) {
    running.finished = true;
    if (next_job_ < jobs_.size()) {
      begin_next(running);
    }
  }
}

void ProgramRun::begin_next(Running& running) {
  running.job = next_job_++;
  running.at = 0;
  running.finished = false;
  const Job& job = jobs_[running.job];
  const ChunkMemory& chunk_memory = chunk_memory_[job.chunk];
  if (chunk_memory.initial != nullptr &&
      (chunk_memory.initial != chunk_memory.home || task_.prescale != 1.0)) {
    const std::byte* from = chunk_memory.initial + job.begin * element_;
    std::byte* to = chunk_memory.home + job.begin * element_;
    const size_t count = job.end - job.begin;
    if (task_.prescale != 1.0) {
      const void* in = from;
      void* out = to;
      reduce({.dtype = task_.reduction.dtype, .pre = &task_.prescale}, {&in, 1}, {&out, 1}, count);
    } else {
      std::memmove(to, from, count * element_);
    }
  }
  reset_progress(running);
}

void ProgramRun::reset_progress(Running& running) {
  const auto& lane = task_.program->lanes[jobs_[running.job].chunk];
  if (running.at == lane.size()) {
    running.finished = true;
    ++finished_;
    elements_left_ -= jobs_[running.job].end - jobs_[running.job].begin;
    return;
  }
  running.sent.assign(lane[running.at].sends.size(), 0);
  running.states.assign(lane[running.at].sends.size(), SendState::unasked);
  running.received.assign(lane[running.at].receives.size(), 0);
}

bool ProgramRun::step() {
  if (!task_.transport->has_changed(seen_changes_)) {
    return false;
  }
  moved_ = false;
  asks_turns_ = std::exchange(received_before_, received_) != received_;
  has_begun_ = has_begun_ || task_.others->may_begin(task_);
  const int64_t until = task_.transport->held_back_until_ns();
  holds_back_ = until > 0 && now_ns() < until;
  for (Running& running : window_) {
    while (!running.finished && advance(running)) {
      moved_ = true;
    }
    while (running.finished && next_job_ < jobs_.size()) {
      begin_next(running);
      moved_ = true;
    }
  }
  if (moved_) {
    seen_changes_ = 0;  // what one job did may let another one go on
  }
  return moved_;
}

// True when the lane's step is complete and the lane moved on to its next one.
bool ProgramRun::advance(Running& running) {
  const Job& job = jobs_[running.job];
  const LaneStep& step = task_.program->lanes[job.chunk][running.at];
  std::byte* home = chunk_memory_[job.chunk].home + job.begin * element_;
  const size_t bytes = bytes_of(job);
  if (!send_all(running, step, home, bytes) || !receive_all(running, step, home, bytes)) {
    return false;
  }
  ++running.at;
  reset_progress(running);
  return true;
}

MessageTag ProgramRun::tag_of(const Running& running, const LaneStep& step) const {
  const Job& job = jobs_[running.job];
  const uint64_t segment = job.begin / segment_;
  const uint64_t lane = segment * task_.program->schedule.chunks + job.chunk;
  return {task_.operation, lane * steps_ + step.step};
}

// Whether the message may go on, or start. Turns come with what is received.
bool ProgramRun::may_start(Running& running, const LaneStep& step, size_t send) {
  SendState& state = running.states[send];
  if (state == SendState::known_to_transport) {
    return !holds_back_;
  }
  if (state == SendState::unasked || (state == SendState::not_its_turn && asks_turns_)) {
    state = is_turn(running, step, send) ? SendState::may_start : SendState::not_its_turn;
  }
  return state == SendState::may_start && has_begun_;
}

// Whether it is the message's turn (program.h).
bool ProgramRun::is_turn(const Running& running, const LaneStep& step, size_t send) const {
  const Turn& turn = step.turns[send];
  const size_t begin = jobs_[running.job].begin;
  const size_t ago = turn.segments_ago * segment_;
  if (turn.source < 0 || begin < ago || !task_.transport->takes_turns()) {
    return true;
  }
  const size_t early = task_.transport->early_bytes(task_.priority);
  if (bytes_of(jobs_[running.job]) <= early) {
    return true;
  }
  const auto is_awaited = [&](const Job& job) {
    return job.begin == begin - ago && job.chunk == turn.chunk;
  };
  for (const Running& other : window_) {
    if (!other.finished && is_awaited(jobs_[other.job])) {
      const Job& job = jobs_[other.job];
      const LaneStep& at = task_.program->lanes[job.chunk][other.at];
      const auto source = std::find(at.receives.begin(), at.receives.end(), turn.source);
      return at.step > step.step ||
             (at.step == step.step &&
              other.received[source - at.receives.begin()] + early >= bytes_of(job));
    }
  }
  // Jobs begin in the order of their segments.
  for (size_t next = next_job_; next < jobs_.size() && jobs_[next].begin <= begin - ago; ++next) {
    if (is_awaited(jobs_[next])) {
      return false;
    }
  }
  return true;
}

bool ProgramRun::send_all(Running& running, const LaneStep& step, std::byte* home, size_t bytes) {
  bool complete = true;
  for (size_t i = 0; i < step.sends.size(); ++i) {
    size_t& sent = running.sent[i];
    if (sent == bytes) {
      continue;
    }
    if (!may_start(running, step, i)) {
      complete = false;
      continue;
    }
    const size_t before = sent;
    const Message message{.tag = tag_of(running, step), .total = bytes, .priority = task_.priority};
    sent = task_.transport->push(step.sends[i], message, home, sent);
    running.states[i] = SendState::known_to_transport;
    sent_ += sent - before;
    moved_ |= sent != before;
    complete &= sent == bytes;
  }
  return complete;
}

bool ProgramRun::receive_all(Running& running, const LaneStep& step, std::byte* home,
                             size_t bytes) {
  const size_t sources = step.receives.size();
  const bool gathers = step.reduces && sources > 1;
  if (gathers && running.gathered.size() < sources * bytes) {
    running.gathered.resize(sources * bytes);
  }
  bool complete = true;
  for (size_t i = 0; i < sources; ++i) {
    size_t& received = running.received[i];
    if (received == bytes) {
      continue;
    }
    const int source = step.receives[i];
    auto take = [&](const std::byte* data, size_t offset, size_t n) {
      if (gathers) {
        std::memcpy(running.gathered.data() + i * bytes + offset, data, n);
      } else if (!step.reduces) {
        std::memcpy(home + offset, data, n);
      } else {
        const int me = task_.program->rank;
        operands_.clear();
        operand_factors_.clear();
        if (source < me) {
          add_operand(data, source);
        }
        add_operand(home + offset, me);
        if (source > me) {
          add_operand(data, source);
        }
        reduce_operands(running, step, offset, n);
      }
    };
    std::byte* destination = gathers        ? running.gathered.data() + i * bytes
                             : step.reduces ? nullptr
                                            : home;
    const size_t before = received;
    const Message message{.tag = tag_of(running, step), .total = bytes};
    received = task_.transport->pull(source, message, received, Sink(take, destination));
    received_ += received - before;
    moved_ |= received != before;
    complete &= received == bytes;
  }
  if (complete && gathers) {
    reduce_gathered(running, step, home, bytes);
  }
  return complete;
}

void ProgramRun::reduce_gathered(Running& running, const LaneStep& step, std::byte* home,
                                 size_t bytes) {
  operands_.clear();
  operand_factors_.clear();
  const int me = task_.program->rank;
  in_rank_order(
      step, me, [&] { add_operand(home, me); },
      [&](size_t i) { add_operand(running.gathered.data() + i * bytes, step.receives[i]); });
  reduce_operands(running, step, 0, bytes);
}

void ProgramRun::add_operand(const void* data, int rank) {
  operands_.push_back(data);
  const double* factors = task_.reduction.pre;
  operand_factors_.push_back(factors == nullptr ? 1.0 : factors[rank]);
}

// `offset`: of the job's bytes.
void ProgramRun::reduce_operands(const Running& running, const LaneStep& step, size_t offset,
                                 size_t bytes) {
  const Job& job = jobs_[running.job];
  const ChunkMemory& memory = chunk_memory_[job.chunk];
  const size_t in_chunk = job.begin * element_ + offset;
  void* outputs[1] = {memory.home + in_chunk};
  ReduceSpec spec = task_.reduction;
  if (!step.completes) {
    spec.post = 1.0;
    spec.divisor = 1;
  }
  if (spec.pre != nullptr) {
    spec.pre = operand_factors_.data();
  }
  if (spec.check.found != nullptr) {
    const auto in_buffer = static_cast<size_t>(memory.initial - task_.input) + in_chunk;
    spec.check.first_element = in_buffer / element_;
    spec.check.ranks = step.operands.data();
  }
  reduce(spec, operands_, outputs, bytes / element_);
}

int ProgramRun::waiting_for() const {
  for (const Running& running : window_) {
    if (running.finished) {
      continue;
    }
    const Job& job = jobs_[running.job];
    const LaneStep& step = task_.program->lanes[job.chunk][running.at];
    const size_t bytes = bytes_of(job);
    for (size_t i = 0; i < step.sends.size(); ++i) {
      if (running.sent[i] < bytes) {
        return running.states[i] == SendState::not_its_turn ? step.turns[i].source : step.sends[i];
      }
    }
    for (size_t i = 0; i < step.receives.size(); ++i) {
      if (running.received[i] < bytes) {
        return step.receives[i];
      }
    }
  }
  return -1;
}

bool RunsInFlight::may_begin(const ProgramRun::Task& task) const {
  size_t left = 0;
  for (const ProgramRun* run : runs_) {
    const ProgramRun::Task& other = run->task();
    if (other.operation < task.operation && other.priority >= task.priority &&
        other.program == task.program) {
      left += run->bytes_left();
    }
  }
  return left <= kSegmentsLeft * task.transport->segment_bytes();
}

}  // namespace dpcore
