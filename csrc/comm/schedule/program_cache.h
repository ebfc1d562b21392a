// The programs that the calls of one communicator run on one rank, each compiled at its first use,
// and which of them the communicator may run.
//
// Threads: under the lock of whoever owns it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "comm/base/error.h"
#include "comm/schedule/check.h"
#include "comm/schedule/program.h"

namespace dpcore {

class ProgramCache {
 public:
  // `hosts`: as for make_schedule().
  ProgramCache(int rank, int world, std::vector<int> hosts, bool deterministic)
      : rank_(rank), world_(world), hosts_(std::move(hosts)), deterministic_(deterministic) {}

  // Throws Unsupported when the collective has no such algorithm.
  const std::shared_ptr<const Program>& of(const std::string& algorithm, Collective collective,
                                           int root) {
    auto& program = programs_[{algorithm, collective, root}];
    if (!program) {
      program = compile(make_schedule(algorithm, collective, world_, root, hosts_), rank_);
    }
    return program;
  }
  // Throws Unsupported when results must not depend on the layout and those of the schedule do.
  void check_deterministic(const Schedule& schedule) const {
    if (deterministic_ && !schedule.ordered && !is_ordered(schedule)) {
      throw Unsupported("algorithm '" + schedule.algorithm +
                        "' adds in an order that depends on the layout; deterministic=True allows "
                        "one_shot, two_shot and direct");
    }
  }

 private:
  int rank_;
  int world_;
  std::vector<int> hosts_;
  bool deterministic_;
  std::map<std::tuple<std::string, Collective, int>, std::shared_ptr<const Program>> programs_;
};

}  // namespace dpcore
