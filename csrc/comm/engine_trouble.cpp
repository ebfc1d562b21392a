// What a thread that waits looks at every kSliceNs: dead and departed peers, failures that peers
// have published, deadlines. Called under the seat.
#include <cstdio>

#include "comm/clock.h"
#include "comm/engine.h"

namespace dpcore {

void Engine::look_for_trouble() {
  last_look_ns_ = now_ns();
  if (Network* network = endpoint_->network()) {
    network->look_for_broken_lines();
  }
  endpoint_->look_for_deaths();
  for (const auto& operation : active_) {
    Group& group = operation->group();
    group.show_life(last_look_ns_);
    if (group.failed() || group.adopt_failure_of_peer()) {
      continue;
    }
    for (int r = 0; r < group.world() && !group.failed(); ++r) {
      const bool gone = group.is_dead(r) || group.has_left(r);
      if (r == group.rank() || !gone || !operation->needs(r)) {
        continue;
      }
      const std::string process = std::to_string(group.endpoint().process_of(group.member(r)));
      group.fail(ErrorKind::peer_lost, r,
                 "rank " + std::to_string(r) + " (process " + process + ") " +
                     (group.has_left(r) ? "finalized and left"
                                        : group.endpoint().how_it_ended(group.member(r))) +
                     " and is needed for " + operation->describe() + "; " +
                     group.last_operation_of(r) +
                     ". Start the job again, or call init() anew with the ranks that remain");
    }
    if (!group.failed() && last_look_ns_ >= operation->deadline_ns) {
      char seconds[32];
      std::snprintf(seconds, sizeof(seconds), "%.3g", operation->timeout_s);
      group.fail(ErrorKind::timeout, operation->first_late(),
                 operation->describe() + " was not complete after " + seconds + " s; " +
                     operation->who_is_late() +
                     ". Look at what the late rank does, or allow a longer timeout in init()");
    }
  }
}

}  // namespace dpcore
