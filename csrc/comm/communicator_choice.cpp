// Which algorithm an operation runs: asked for, or chosen; and why, for whoever wants to know.
#include <numeric>

#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "comm/collective/stage_layout.h"
#include "comm/communicator.h"
#include "comm/schedule/names.h"

namespace dpcore {
namespace {

uint64_t hash_of(const AskedAlgorithm& asked) {
  return Fnv().add(asked.name).add(asked.literal ? 1 : 0).value();
}

}  // namespace

// Where ranks that share memory play at a slow network, each has a NIC of its own.
std::vector<int> Communicator::hosts_for_costs() const {
  std::vector<int> hosts = group_->hosts();
  if (options_.link && group_->remote() == nullptr) {
    std::iota(hosts.begin(), hosts.end(), 0);
  }
  return hosts;
}

void Communicator::choose_algorithm(Request& request, const std::string& name) {
  const bool by_messages = goes_by_messages();
  const bool uneven_exchange = announces_parts(request);
  if (uneven_exchange && (request.program || (!name.empty() && name != "auto"))) {
    throw Unsupported("all_to_all with uneven parts has one algorithm; leave algorithm out");
  }
  if (uneven_exchange) {
    if (static_cast<size_t>(world()) * sizeof(uint64_t) > kAnnouncedBytes) {
      throw Unsupported("all_to_all with uneven parts is for at most " +
                        std::to_string(kAnnouncedBytes / sizeof(uint64_t)) + " ranks");
    }
    if (by_messages) {
      request.program = programs_.of("direct", request.collective, request.root);
    }
    return;
  }
  if (request.program) {  // the user's own schedule
    programs_.check_deterministic(request.program->schedule);
    request.algorithm = request.program->hash;
    return;
  }
  if (request.collective == Collective::barrier) {
    return;
  }
  const AskedAlgorithm asked =  // most calls name none, and then no name is looked at
      name.empty() && is_open_ ? AskedAlgorithm()
                               : resolve_algorithm(request.collective, name, options_.algorithm);
  if (asked.is_open()) {
    // A small operation over TCP needs no messages, unless a link is to hold them back.
    const bool has_remote = group_->remote() != nullptr;
    if (by_messages && (options_.link || !is_small(request, world(), has_remote))) {
      const size_t bytes = bytes_of(request, world());
      request.program = programs_.of(choice_.choose(request.collective, bytes, request.ordered),
                                     request.collective, request.root);
      request.algorithm = request.program->hash;  // the choice hangs on options of each rank
    }
    return;
  }
  request.algorithm = hash_of(asked);
  const bool literal = by_messages || asked.literal;
  if (!literal && asked.name == "direct" && request.collective != Collective::all_reduce) {
    return;
  }
  if (!literal && request.collective == Collective::all_reduce &&
      (asked.name == "one_shot" || asked.name == "two_shot")) {
    request.force = asked.name == "one_shot" ? Path::stage : Path::two_shot_push;
    return;
  }
  request.program = programs_.of(asked.name, request.collective, request.root);
  programs_.check_deterministic(request.program->schedule);
}

Explanation Communicator::explain(Collective collective, size_t bytes) {
  Explanation why;
  const AskedAlgorithm asked = resolve_algorithm(collective, "", options_.algorithm);
  why.asked = !asked.is_open();
  if (world() == 1 || collective == Collective::barrier) {
    return why;
  }
  if (goes_by_messages()) {
    const bool small = !options_.link && bytes <= small_bytes(world(), group_->remote() != nullptr);
    why.way = small && !why.asked ? Explanation::Way::entry : Explanation::Way::messages;
  } else {
    const bool fused =
        asked.name == "one_shot" || asked.name == "two_shot" || asked.name == "direct";
    why.way = why.asked && (asked.literal || !fused) ? Explanation::Way::messages
                                                     : Explanation::Way::memory;
  }
  const std::lock_guard<SpinLock> lock(submission_);
  why.candidates = choice_.candidates(collective);
  why.algorithm = why.asked ? asked.name : choice_.choose(collective, bytes, false);
  return why;
}

}  // namespace dpcore
