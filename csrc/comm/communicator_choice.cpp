// Which algorithm an operation runs: asked for, or chosen; and why, for whoever wants to know.
#include <numeric>

#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "comm/communicator.h"
#include "comm/schedule/check.h"
#include "comm/schedule/names.h"

namespace dpcore {
namespace {

uint64_t hash_of(const std::string& text) { return Fnv().add(text).value(); }

}  // namespace

// Where ranks that share memory play at a slow network, each has a card of its own.
std::vector<int> Communicator::hosts_for_costs() const {
  std::vector<int> hosts = group_->hosts();
  if (options_.link && group_->remote() == nullptr) {
    std::iota(hosts.begin(), hosts.end(), 0);
  }
  return hosts;
}

void Communicator::choose_algorithm(Request& request, const std::string& name) {
  const bool by_messages = goes_by_messages();
  const bool uneven_exchange =
      request.collective == Collective::all_to_all && !request.input_parts.empty();
  if (uneven_exchange && (request.program || (!name.empty() && name != "auto"))) {
    throw Unsupported("all_to_all with uneven parts has one algorithm; leave algorithm out");
  }
  if (uneven_exchange) {
    request.program = by_messages ? program_for(request, "direct") : nullptr;
    return;
  }
  if (request.program) {  // the user's own schedule
    check_deterministic(request.program->schedule);
    request.algorithm = request.program->hash;
    return;
  }
  if (request.collective == Collective::barrier) {
    return;
  }
  const std::string& wanted = name.empty() ? options_.algorithm : name;
  const bool literal = by_messages || wanted.ends_with(kLiteral);
  const std::string base = without_suffix(wanted);
  // The communicator's own choice is for the collectives that have it.
  if (wanted == "auto" || (name.empty() && !is_algorithm_of(request.collective, base))) {
    // A small operation over TCP needs no messages, unless a link is to hold them back.
    if (by_messages && (options_.link || !CollectiveOperation::is_small(request, world()))) {
      request.program = program_for(
          request,
          choice_.choose(request.collective, CollectiveOperation::bytes_of(request, world())));
    }
    return;
  }
  request.algorithm = hash_of(wanted);
  if (!literal && base == "direct" && request.collective != Collective::all_reduce) {
    return;
  }
  if (!literal && request.collective == Collective::all_reduce &&
      (base == "one_shot" || base == "two_shot")) {
    request.force = base == "one_shot" ? Path::stage : Path::two_shot_push;
    return;
  }
  request.program = program_for(request, base);
  check_deterministic(request.program->schedule);
}

std::shared_ptr<const Program> Communicator::program_for(const Request& request,
                                                         const std::string& algorithm) {
  auto& program = programs_[{algorithm, {static_cast<int>(request.collective), request.root}}];
  if (!program) {
    program = compile(
        make_schedule(algorithm, request.collective, world(), request.root, choice_.hosts()),
        rank());
  }
  return program;
}

void Communicator::check_deterministic(const Schedule& schedule) const {
  if (options_.deterministic && !schedule.ordered && !is_ordered(schedule)) {
    throw Unsupported("algorithm '" + schedule.algorithm +
                      "' adds in an order that depends on the layout; deterministic=True allows "
                      "one_shot, two_shot and direct");
  }
}

Explanation Communicator::explain(Collective collective, size_t bytes) {
  Explanation why;
  const std::string wanted = without_suffix(options_.algorithm);
  why.asked = wanted != "auto" && is_algorithm_of(collective, wanted);
  if (world() == 1 || collective == Collective::barrier) {
    return why;
  }
  if (goes_by_messages()) {
    const bool small = bytes <= CollectiveOperation::kSmallBytes && !options_.link;
    why.way = small && !why.asked ? Explanation::Way::entry : Explanation::Way::messages;
  } else {
    const bool fused = wanted == "one_shot" || wanted == "two_shot" || wanted == "direct";
    const bool literal = options_.algorithm.ends_with(kLiteral);
    why.way =
        why.asked && (literal || !fused) ? Explanation::Way::messages : Explanation::Way::memory;
  }
  const std::lock_guard<SpinLock> lock(submission_);
  why.candidates = choice_.candidates(collective);
  why.algorithm = why.asked ? wanted : choice_.choose(collective, bytes);
  return why;
}

}  // namespace dpcore
