// The monitored barrier, which names the ranks that did not come. It uses the group's store, so it
// works beside operations that hang, and its failure does not fail the communicator.
//
// Every rank writes a key. Rank 0 polls until all keys exist or its time is over, and writes the
// outcome for the others. This is thousands of times slower than barrier(), whose Timeout also
// names the late ranks.
#include <chrono>
#include <string>
#include <thread>

#include "comm/base/error.h"
#include "torch_backend/backend.h"

namespace dpcore {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(2);

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

void TorchBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) {
  const auto timeout = options.timeout == c10d::kUnsetTimeout ? options_->timeout : options.timeout;
  const auto deadline = Clock::now() + timeout;
  // The store may be older than the group, and torch gives groups the same names after a restart.
  const std::string job = std::to_string(state_->communicator->endpoint().job());
  const std::string base = "dpcore/monitored/" + job + "/" + std::to_string(++monitored_) + "/";
  const std::string outcome = base + "outcome";
  const std::string in_time = " in " + std::to_string(timeout.count()) + " ms";
  const auto pause = [&] {
    state_->interrupt();
    std::this_thread::sleep_for(kLook);
  };

  if (getRank() != 0) {
    store_->set(base + std::to_string(getRank()), bytes_of("here"));
    const std::string arrived = "Rank " + std::to_string(getRank()) +
                                " successfully reached monitoredBarrier, but received errors "
                                "while waiting for send/recv from rank 0";
    while (!store_->check({outcome})) {
      if (Clock::now() > deadline) {
        throw Timeout(arrived + ": it did not answer" + in_time);
      }
      pause();
    }
    const std::vector<uint8_t> answer = store_->get(outcome);
    if (const std::string problem(answer.begin(), answer.end()); problem != "passed") {
      throw PeerLost(arrived + ": " + problem);
    }
    return;
  }

  std::string missing;
  int count = 0;
  for (int r = 1; r < getSize(); ++r) {
    bool here = store_->check({base + std::to_string(r)});
    while (!here && Clock::now() < deadline) {
      pause();
      here = store_->check({base + std::to_string(r)});
    }
    if (!here && (wait_for_all || count == 0)) {
      missing += (count++ > 0 ? ", " : "") + std::to_string(r);
    }
  }
  if (count == 0) {
    store_->set(outcome, bytes_of("passed"));
    return;
  }
  std::string problem = std::string(count > 1 ? "Ranks " : "Rank ") + missing +
                        " failed to pass monitoredBarrier" + in_time;
  if (timeout.count() == 0) {
    problem = "Rank 0 timed out in monitoredBarrier after 0 ms: " + problem;
  }
  store_->set(outcome, bytes_of(problem));
  throw Timeout("[Rank 0]: " + problem);
}

}  // namespace dpcore
