// Which thread gets the progress lock when the progress thread is about to sleep?
//
// An operation in the background keeps the progress thread within its last look before a sleep,
// under the lock, until another thread has called wait() and sleeps for want of the lock. Then
// that thread has to be woken: the progress thread leaves everything to threads that wait. If no
// thread wakes it, it comes back after a slice of 20 ms. On a busy machine a round may take long
// all the same, so the shortest of several counts.
//
// And does an operation go on once its group has failed? The engine gives up what was sent in part,
// so another step would send some of it again.
//
//   handover ROUNDS
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>

#include "check.h"
#include "comm/base/clock.h"
#include "comm/communicator.h"

using namespace dpcore;

namespace {

constexpr int64_t kHalfASliceNs = 10'000'000;
constexpr int64_t kLongEnoughNs = 5'000'000'000;

bool is_asleep(int thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return text.at(text.rfind(')') + 2) == 'S';
}

class Alone : public Operation {  // needs no peer
 public:
  explicit Alone(std::shared_ptr<Group> group) {
    group_ = std::move(group);
    deadline_ns = INT64_MAX;
  }
  Progress advance() override { return Progress::finished; }
  WaitPoint waiting() const override { return {}; }
  std::string describe() const override { return "an operation of this test"; }
  const char* trace_name() const override { return "test"; }
  uint64_t trace_bytes() const override { return 0; }
  uint64_t trace_number() const override { return 0; }
  bool needs(int) const override { return false; }
  std::string describe_late_ranks() const override { return ""; }
  int first_late() const override { return 0; }
  void retire() override {}
};

class KeepsLock final : public Alone {  // until the waiting thread sleeps
 public:
  KeepsLock(std::shared_ptr<Group> group, int waiting_thread)
      : Alone(std::move(group)), waiting_thread_(waiting_thread) {}
  Progress advance() override {
    if (may_end.load()) {
      return Progress::finished;
    }
    if (is_last_poll_ && !is_in_last_poll.exchange(true)) {
      const int64_t until = now_ns() + kLongEnoughNs;
      while (!is_asleep(waiting_thread_) && now_ns() < until) {
        std::this_thread::yield();
      }
    }
    return Progress::blocked;
  }
  bool relieve() override {  // asked for right before that look
    is_last_poll_ = true;
    return false;
  }

  std::atomic<bool> is_in_last_poll{false};
  std::atomic<bool> may_end{false};

 private:
  int waiting_thread_;
  bool is_last_poll_ = false;
};

class Fails final : public Alone {
 public:
  using Alone::Alone;
  Progress advance() override { throw Error("on purpose"); }
};

class SeesFailure final : public Alone {  // if it goes on for too long
 public:
  using Alone::Alone;
  Progress advance() override {
    has_seen = has_seen || group().failed();
    return Progress::blocked;
  }
  bool has_seen = false;
};

void nothing_goes_on_after_a_failure(Engine& engine, const std::shared_ptr<Group>& group) {
  const auto other = std::make_shared<SeesFailure>(group);
  const auto first = std::make_shared<Fails>(group);
  first->priority = 1;
  engine.submit(other, true);
  engine.submit(first, false);
  CHECK(engine.wait(*first, INT64_MAX, {}) && engine.wait(*other, INT64_MAX, {}));
  CHECK(first->status == Operation::failed && other->status == Operation::failed);
  CHECK(!other->has_seen);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 2);
  Options options;
  options.job = "handover";
  const auto comm = Communicator::start(options);
  const std::shared_ptr<Group> group = comm->shared().group_ptr();
  Engine engine(group->endpoint_ptr());
  engine.sleep_early();
  engine.be_ready_for_background();
  int64_t shortest = INT64_MAX;
  for (int round = 0; round < std::stoi(arguments[1]); ++round) {
    const auto background = std::make_shared<KeepsLock>(group, gettid());
    engine.submit(background, true);
    while (!background->is_in_last_poll.load()) {
      std::this_thread::yield();
    }
    const auto urgent = std::make_shared<Alone>(group);
    const int64_t begin = now_ns();
    engine.submit(urgent, false);
    CHECK(engine.wait(*urgent, INT64_MAX, {}));
    shortest = std::min(shortest, now_ns() - begin);
    background->may_end = true;
    CHECK(engine.wait(*background, INT64_MAX, {}));
  }
  CHECK(shortest < kHalfASliceNs);
  nothing_goes_on_after_a_failure(engine, group);
  std::printf("the shortest wait: %.3f ms\n", 1e-6 * static_cast<double>(shortest));
}
