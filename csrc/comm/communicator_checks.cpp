// What a call is refused for before it has a number: a communicator that is over, and memory that
// another operation in flight uses.
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "comm/base/error.h"
#include "comm/communicator.h"

namespace dpcore {
namespace {

// All communicators of the process, where DPCORE_CHECK asks whether they use the same memory at
// once. Never destroyed: communicators may go after it would.
struct Everywhere {
  std::mutex mutex;
  std::vector<Communicator*> communicators;
};
Everywhere& everywhere() {
  static auto* const all = new Everywhere;
  return *all;
}
bool checks_everywhere() {
  static const bool checks = [] {
    const char* text = std::getenv("DPCORE_CHECK");
    return text != nullptr && *text != '\0' && std::string_view(text) != "0";
  }();
  return checks;
}

}  // namespace

void Communicator::show_memory_in_use() {
  if (checks_everywhere()) {
    const std::lock_guard<std::mutex> lock(everywhere().mutex);
    everywhere().communicators.push_back(this);
  }
}

void Communicator::hide_memory_in_use() {
  if (checks_everywhere()) {
    const std::lock_guard<std::mutex> lock(everywhere().mutex);
    std::erase(everywhere().communicators, this);
  }
}

void Communicator::check_not_forked() const {
  if (endpoint().is_forked_copy()) {
    throw Error("rank " + std::to_string(rank()) +
                ": this process was forked after init(); a communicator belongs to the process "
                "that made it. Call init() in the child, or start it with spawn");
  }
}

void Communicator::check_usable() const {
  check_not_forked();
  if (closed_.load(std::memory_order_relaxed)) {
    throw Error("rank " + std::to_string(rank()) +
                ": this communicator was finalized; call init() for a new one");
  }
  if (group_->failed()) {
    group_->raise_failure();
  }
}

void Communicator::check(const Request& request) const {
  check_usable();
  check_operator(request);
  if (checks_everywhere()) {
    check_not_in_use_elsewhere(memory_use(request, rank(), world()));
  }
}

void Communicator::check_message(const MessageCall& call) const {
  check_usable();
  if (call.peer == MessageOperation::kAnyRank && call.bytes == 0) {
    throw Unsupported("rank " + std::to_string(rank()) +
                      ": a message without elements does not travel, so it can't be received from "
                      "any rank; name the rank");
  }
  if (checks_everywhere()) {
    check_not_in_use_elsewhere(memory_use(call.sends, call.data, call.bytes));
  }
}

void Communicator::check_not_in_use(const MemoryUse& use) const {
  const auto check = [&](const auto& pool) {
    for (const auto& other : pool) {
      if (other->status.load(std::memory_order_acquire) == Operation::pending &&
          other->memory_use().conflicts_with(use)) {
        throw Unsupported("rank " + std::to_string(rank()) +
                          ": the memory of this call is in use by " + other->describe() +
                          ", which is still in flight, and one of the two writes it; call wait() "
                          "of that operation first, or pass a copy");
      }
    }
  };
  check(pool_);
  check(message_pool_);
}

void Communicator::check_not_in_use_elsewhere(const MemoryUse& use) const {
  const std::lock_guard<std::mutex> lock(everywhere().mutex);
  for (Communicator* other : everywhere().communicators) {
    const std::lock_guard<SpinLock> its_lock(other->submission_);
    other->check_not_in_use(use);
  }
}

}  // namespace dpcore
