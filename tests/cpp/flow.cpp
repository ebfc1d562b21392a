// How much a connection carries at a time, of a link that moves 100 bytes in a microsecond: when a
// frame may start, which frame overtakes which, and what counts as a poll that came late. Nothing
// is sent.
#include "comm/network/tcp_flow.h"

#include <initializer_list>

#include "check.h"

using namespace dpcore;

namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr size_t kFrame = size_t{128} << 10;
constexpr double kRate = 0.1;  // bytes in a nanosecond

TcpLoad load(double on_the_way, double queued_here) {
  return {.bytes_per_ns = kRate,
          .round_trip_ns = 100'000,
          .on_the_way = on_the_way,
          .queued_here = queued_here};
}

const TcpLoad kIdle = load(0, 0);
const TcpLoad kFull = load(2e6, 2e6);

TcpFlow flow() {
  TcpFlow made;
  made.share(kFrame, TcpFlow::kSegmentBytes);
  return made;
}

void before_the_rate_is_known_all_have_room() {
  TcpFlow made = flow();
  CHECK(made.has_room({.on_the_way = 1e9, .queued_here = 1e9}, 0, Precedence::first, 0));
}

// 30 ms of the link and two round trips, wherever that is.
void without_priorities_the_queue_is_long() {
  TcpFlow made = flow();
  CHECK(made.has_room(load(3.01e6, 3.01e6), 0, Precedence::none, 0));
  CHECK(!made.has_room(load(3.03e6, 0), 0, Precedence::none, 0));
  CHECK(made.free_ns() == 130'000);  // 10,000 bytes too many, and how long a refusal holds
}

// Half a millisecond of the link in this host; a segment and two round trips on the way.
void with_priorities_it_is_short() {
  TcpFlow made = flow();
  CHECK(made.has_room(load(200e3, 49e3), 1, Precedence::first, 0));
  CHECK(!made.has_room(load(200e3, 60e3), 1, Precedence::first, 0));
  CHECK(made.free_ns() == 250'000);
  CHECK(made.has_room(load(280e3, 0), 1, Precedence::first, kMillisecond));
  CHECK(!made.has_room(load(300e3, 0), 1, Precedence::first, kMillisecond));
}

void an_urgent_frame_starts_at_once_and_holds_back_its_equals() {
  TcpFlow made = flow();
  CHECK(!made.has_room(kFull, 0, Precedence::first, 0));
  CHECK(made.has_room(kFull, 1, Precedence::first, 0));
  CHECK(!made.has_room(kFull, 1, Precedence::first, 0));
  CHECK(!made.has_room(kFull, 0, Precedence::first, 0));
  CHECK(made.has_room(kFull, 2, Precedence::first, 0));
}

// A quarter of that, while something more urgent is in flight.
void an_overtaken_frame_only_fills_a_gap() {
  TcpFlow made = flow();
  CHECK(made.has_room(load(60e3, 12e3), 1, Precedence::overtaken, 0));
  CHECK(!made.has_room(load(60e3, 13e3), 1, Precedence::overtaken, 0));
  CHECK(!made.has_room(load(80e3, 0), 1, Precedence::overtaken, 0));
  CHECK(!made.is_refused(2, 1000));
  CHECK(made.has_room(load(80e3, 13e3), 2, Precedence::first, 1000));
}

// The kernel need not be asked meanwhile, except for something more urgent.
void a_refusal_holds_for_a_while() {
  TcpFlow made = flow();
  CHECK(!made.is_refused(0, 0));
  CHECK(!made.has_room(kFull, 0, Precedence::first, 0));
  CHECK(made.is_refused(0, 149'999));
  CHECK(!made.is_refused(1, 149'999));
  CHECK(!made.is_refused(0, 150'000));
  CHECK(made.has_room(kFull, 1, Precedence::first, 1000));
  CHECK(!made.is_refused(0, 2000));
}

// A poll that comes late has left the link idle, so more is kept here from then on: up to a
// segment, until polls have come in time for a while.
void late_polls_lengthen_the_queue() {
  TcpFlow made = flow();
  CHECK(made.unsent() == kFrame);
  CHECK(!made.has_room(kFull, 0, Precedence::first, 0));
  int64_t now = made.free_ns() + 2 * kMillisecond;
  CHECK(made.has_room(load(199e3, 199e3), 0, Precedence::first, now));
  CHECK(made.unsent() == 200'000);
  for (int i = 0; i < 200; ++i) {
    CHECK(!made.has_room(kFull, 0, Precedence::first, now));
    now = made.free_ns();
  }
  CHECK(!made.has_room(load(60e3, 60e3), 0, Precedence::first, now));
  CHECK(made.unsent() < 200'000);
  now = made.free_ns() + 1000 * kMillisecond;
  CHECK(!made.has_room(kFull, 0, Precedence::first, now));
  CHECK(made.unsent() == TcpFlow::kSegmentBytes);
  CHECK(!made.has_room(load(270e3, 270e3), 0, Precedence::first, now));
}

// Frames that started instead were not late, nor was the next one, whenever it came.
void a_poll_at_which_no_frame_waited_is_not_late() {
  for (const TcpLoad& next : {kIdle, kFull}) {
    TcpFlow made = flow();
    CHECK(!made.has_room(kFull, 0, Precedence::first, 0));
    CHECK(made.has_room(next, 1, Precedence::first, 0));
    CHECK(!made.has_room(kFull, 0, Precedence::first, made.free_ns() + 1000 * kMillisecond));
    CHECK(made.unsent() == kFrame);
  }
}

}  // namespace

int main() {
  before_the_rate_is_known_all_have_room();
  without_priorities_the_queue_is_long();
  with_priorities_it_is_short();
  an_urgent_frame_starts_at_once_and_holds_back_its_equals();
  an_overtaken_frame_only_fills_a_gap();
  a_refusal_holds_for_a_while();
  late_polls_lengthen_the_queue();
  a_poll_at_which_no_frame_waited_is_not_late();
  std::puts("flow: fine");
  return 0;
}
