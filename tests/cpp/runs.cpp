// Which messages the runs of a program send, and when they ask the transport at all. The transport
// takes everything, and gives as many segments as a case says.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "comm/network/changes.h"
#include "comm/operations/executor.h"
#include "comm/schedule/schedule.h"

using namespace dpcore;

namespace {

constexpr int kWorld = 4;
constexpr size_t kSegment = size_t{64} << 10;
constexpr size_t kSegmentsOfChunk = 10;

class Cable final : public Transport {
 public:
  size_t push(int, const Message& message, const std::byte*, size_t) override {
    ++pushed[message.tag.operation];
    return message.total;
  }
  size_t pull(int, const Message& message, size_t from, const Sink& sink) override {
    ++asked;
    const size_t end = message.total - std::min(message.total, missing);
    if (message.tag.operation != gives_to || gives == 0 || from >= end) {
      return from;
    }
    --gives;
    if (sink.destination() != nullptr) {
      std::fill_n(sink.destination() + from, end - from, std::byte{0});
    } else {
      const std::vector<std::byte> zeros(end - from);
      sink(zeros.data(), from, zeros.size());
    }
    return end;
  }
  uint64_t changes() override { return change; }
  bool set_aside_unexpected() override { return false; }
  size_t segment_bytes() const override { return kSegment; }
  bool takes_turns() const override { return true; }
  size_t early_bytes(int priority) const override { return priority > 0 ? early : 0; }
  Sent sent() const override { return {}; }
  std::vector<std::shared_ptr<std::byte>> take_blocks() override { return {}; }

  std::vector<int> pushed = std::vector<int>(4, 0);  // messages, by operation
  int asked = 0;
  uint64_t gives_to = 0;  // this operation
  int gives = 0;          // so many messages
  uint64_t change = 0;
  size_t missing = 0;  // of each message, does not come
  size_t early = 0;    // before its turn, an urgent message begins
};

// An all-reduce of rank 0.
struct Run {
  Run(Cable& cable, RunsInFlight& others, std::shared_ptr<const Program> made, uint64_t operation,
      int priority = 0)
      : program(std::move(made)), data(kWorld * kSegmentsOfChunk * kSegment), entry(others, moves) {
    std::vector<ChunkMemory> chunks(kWorld);
    for (int chunk = 0; chunk < kWorld; ++chunk) {
      std::byte* at = data.data() + chunk * kSegmentsOfChunk * kSegment;
      chunks[chunk] = {at, at, kSegmentsOfChunk * kSegment / sizeof(float)};
    }
    ProgramRun::Task task;
    task.program = program.get();
    task.transport = &cable;
    task.others = &others;
    task.operation = operation;
    task.priority = priority;
    task.reduction.dtype = DType::f32;
    moves.start(task, chunks);
  }
  void go_on() {
    while (moves.step()) {
    }
  }

  std::shared_ptr<const Program> program;
  std::vector<std::byte> data;
  ProgramRun moves;
  RunsInFlight::Entry entry;
};

std::shared_ptr<const Program> program_of(const char* algorithm) {
  return compile(make_schedule(algorithm, Collective::all_reduce, kWorld), 0);
}

void a_run_begins_to_send_when_little_of_the_earlier_ones_is_left() {
  Cable cable;
  RunsInFlight others;
  const auto program = program_of("two_shot");
  Run first(cable, others, program, 1);
  Run second(cable, others, program, 2);
  cable.gives_to = 1;
  while (!first.moves.done()) {
    cable.gives = 1;
    first.go_on();
    second.go_on();
    CHECK((cable.pushed[2] > 0) == (first.moves.bytes_left() <= 12 * kSegment));
  }
}

void what_is_more_urgent_or_has_another_list_of_moves_waits_for_none() {
  Cable cable;
  RunsInFlight others;
  const auto program = program_of("two_shot");
  Run large(cable, others, program, 1);
  Run urgent(cable, others, program, 2, 1);
  Run ring(cable, others, program_of("ring"), 3);
  for (Run* run : {&large, &urgent, &ring}) {
    run->go_on();
  }
  CHECK(cable.pushed[2] > 0);
  CHECK(cable.pushed[3] > 0);
}

void a_run_that_has_begun_is_held_up_by_no_earlier_one() {
  Cable cable;
  RunsInFlight others;
  const auto program = program_of("two_shot");
  Run second(cable, others, program, 2);
  second.go_on();
  CHECK(cable.pushed[2] > 0);
  const int begun = cable.pushed[2];
  Run first(cable, others, program, 1);  // it was held up, and keeps nobody from going on
  cable.gives_to = 2;
  cable.gives = 8;
  second.go_on();
  CHECK(cable.pushed[2] > begun);
}

void an_urgent_message_begins_a_little_before_its_turn() {
  for (const int priority : {0, 1}) {
    Cable cable;
    RunsInFlight others;
    cable.early = kSegment / 2;
    Run run(cable, others, program_of("two_shot"), 1, priority);
    run.go_on();
    const int begun = cable.pushed[1];
    cable.gives_to = 1;
    cable.gives = INT_MAX;
    cable.missing = cable.early + 1;
    run.go_on();
    CHECK(cable.pushed[1] == begun);
    cable.missing = cable.early;
    run.go_on();
    CHECK((cable.pushed[1] > begun) == (priority > 0));
  }
}

void no_urgent_message_that_is_short_waits_for_its_turn() {
  Cable cable;
  RunsInFlight others;
  cable.early = kSegment;
  Run run(cable, others, program_of("two_shot"), 1, 1);
  run.go_on();
  constexpr int kSegmentsInWindow = 2;
  CHECK(cable.pushed[1] == kSegmentsInWindow * (kWorld - 1));
}

void the_transport_is_asked_when_something_has_changed() {
  Cable cable;
  RunsInFlight others;
  Run run(cable, others, program_of("two_shot"), 1);
  cable.change = 1;
  run.go_on();
  const int asked = cable.asked;
  CHECK(asked > 0);
  run.go_on();
  CHECK(cable.asked == asked);
  cable.change = 2;
  run.go_on();
  CHECK(cable.asked > asked);
}

void a_claim_holds_until_the_next_poll_and_the_next_change() {
  Changes changes;
  CHECK(!changes.holds({}));
  const Changes::Claim claim = changes.claim();
  CHECK(changes.holds(claim));
  changes.begin_poll();
  CHECK(changes.holds(claim));
  changes.record();
  CHECK(!changes.holds(claim));
}

void a_change_that_a_claim_made_vain_comes_again_with_the_next_poll() {
  Changes changes;
  const Changes::Claim claim = changes.claim();
  changes.record();
  const uint64_t seen = changes.count();
  CHECK(changes.holds(claim));
  changes.begin_poll();
  CHECK(changes.count() != seen);
  CHECK(!changes.holds(claim));
  const uint64_t then = changes.count();
  changes.begin_poll();
  CHECK(changes.count() == then);
}

}  // namespace

int main() {
  a_claim_holds_until_the_next_poll_and_the_next_change();
  a_change_that_a_claim_made_vain_comes_again_with_the_next_poll();
  a_run_begins_to_send_when_little_of_the_earlier_ones_is_left();
  what_is_more_urgent_or_has_another_list_of_moves_waits_for_none();
  a_run_that_has_begun_is_held_up_by_no_earlier_one();
  an_urgent_message_begins_a_little_before_its_turn();
  no_urgent_message_that_is_short_waits_for_its_turn();
  the_transport_is_asked_when_something_has_changed();
  std::puts("runs: fine");
}
