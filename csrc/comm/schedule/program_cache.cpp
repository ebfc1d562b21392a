// See program_cache.h.
#include "comm/schedule/program_cache.h"

#include "comm/base/error.h"
#include "comm/schedule/check.h"

namespace dpcore {

const std::shared_ptr<const Program>& ProgramCache::of(const std::string& algorithm,
                                                       Collective collective, int root) {
  auto& program = programs_[{algorithm, collective, root}];
  if (!program) {
    program = compile(make_schedule(algorithm, collective, world_, root, hosts_), rank_);
  }
  return program;
}

void ProgramCache::check_deterministic(const Schedule& schedule) const {
  if (deterministic_ && !schedule.ordered && !is_ordered(schedule)) {
    throw Unsupported("algorithm '" + schedule.algorithm +
                      "' adds in an order that depends on the layout; deterministic=True allows "
                      "one_shot, two_shot and direct");
  }
}

}  // namespace dpcore
