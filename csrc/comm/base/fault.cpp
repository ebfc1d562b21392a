// Parsing and firing of DPCORE_FAULT. See fault.h for the grammar.
#include "comm/base/fault.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/base/error.h"

namespace dpcore::fault {
namespace {

// In the order of Point; "exit" as the first word is an action.
constexpr std::array<std::string_view, 7> kPoints = {"init", "grow",   "entry", "middle",
                                                     "exit", "thread", "shrink"};
constexpr int kAnyRank = -1;
constexpr int64_t kAnyOperation = -1;

struct Fault {
  std::string action;
  int64_t delay_ms = 0;
  int rank = kAnyRank;
  int64_t operation = kAnyOperation;
  Point point = Point::entry;
  std::atomic<bool> fired{false};
};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    text = at == std::string_view::npos ? std::string_view{} : text.substr(at + 1);
  }
  return parts;
}

int64_t number(std::string_view digits, std::string_view whole) {
  int64_t value = 0;
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (problem != std::errc{} || end != digits.data() + digits.size()) {
    throw Unsupported("DPCORE_FAULT: '" + std::string(whole) + "' has no whole number");
  }
  return value;
}

std::unique_ptr<Fault> parse_one(std::string_view text) {
  auto fault = std::make_unique<Fault>();
  for (std::string_view part : split(text, ':')) {
    if (part.starts_with("rank")) {
      fault->rank = static_cast<int>(number(part.substr(4), part));
    } else if (part.starts_with("op")) {
      fault->operation = number(part.substr(2), part);
    } else if (part.starts_with("delay=")) {
      fault->action = "delay";
      fault->delay_ms = number(part.substr(6), part);
    } else if (const auto* point = std::find(kPoints.begin(), kPoints.end(), part);
               point != kPoints.end() && (part != "exit" || !fault->action.empty())) {
      fault->point = static_cast<Point>(point - kPoints.begin());
    } else if (part == "kill" || part == "stop" || part == "exit" || part == "abort" ||
               part == "segv" || part == "throw") {
      fault->action = part;
    } else {
      throw Unsupported("DPCORE_FAULT: unknown word '" + std::string(part) +
                        "'; write action:rankR:opN:point, for example kill:rank1:op7:middle");
    }
  }
  if (fault->action.empty()) {
    throw Unsupported("DPCORE_FAULT: '" + std::string(text) + "' names no action");
  }
  return fault;
}

const std::vector<std::unique_ptr<Fault>>& faults() {
  static const auto parsed = [] {
    std::vector<std::unique_ptr<Fault>> list;
    if (const char* text = std::getenv("DPCORE_FAULT")) {
      for (std::string_view part : split(text, ',')) {
        list.push_back(parse_one(part));
      }
    }
    return list;
  }();
  return parsed;
}

void perform(const Fault& fault, int rank) {
  if (fault.action == "delay") {
    const timespec pause{fault.delay_ms / 1000, (fault.delay_ms % 1000) * 1'000'000};
    nanosleep(&pause, nullptr);
  } else if (fault.action == "kill") {
    kill(getpid(), SIGKILL);
  } else if (fault.action == "stop") {
    kill(getpid(), SIGSTOP);
  } else if (fault.action == "exit") {
    _exit(0);
  } else if (fault.action == "abort") {
    abort();
  } else if (fault.action == "segv") {
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
  } else {
    throw Error((rank == kNoRank ? "" : "rank " + std::to_string(rank) + ": ") +
                std::string("a fault was injected by DPCORE_FAULT"));
  }
}

}  // namespace

bool holds_any() { return !faults().empty(); }

void reach_slow(Point point, int rank, uint64_t operation) {
  for (const auto& fault : faults()) {
    const bool matches =
        fault->point == point && (fault->rank == kAnyRank || fault->rank == rank) &&
        (fault->operation == kAnyOperation || fault->operation == static_cast<int64_t>(operation));
    if (matches && !fault->fired.exchange(true)) {
      perform(*fault, rank);
    }
  }
}

}  // namespace dpcore::fault
