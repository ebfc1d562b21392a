// How an operation enters where ranks share no memory: with a frame to each of them.
//
// What this rank wrote into its slot travels, and with it the part of its stage that the peer
// would read there: a small operation is over with one frame each way, and the code that runs it
// is the one for mapped memory. Larger data follows by the transport once all have entered.
#include "comm/operations/paths.h"

namespace dpcore {

void tell_remote_members(const PathRun& run, bool is_prefilled) {
  RemoteMembers& remote = *run.group->remote();
  const std::byte* stage = is_prefilled ? run.stage_of(run.me()) : nullptr;
  for (int r = 0; r < run.world(); ++r) {
    if (!remote.contains(r)) {
      continue;
    }
    size_t begin = 0;
    size_t bytes = 0;
    if (run.is_small && run.publishes() && run.consumes(r)) {
      begin = static_cast<size_t>(run.stage_buffer(run.me(), 0, r, run.stage_quota()) - stage);
      bytes = run.outgoing(r).elements * run.element;
    } else if (run.announces_parts) {
      bytes = static_cast<size_t>(run.world()) * sizeof(uint64_t);
    }
    remote.tell_post(r, run.own_slot(), run.bytes, stage, begin, bytes);
  }
}

}  // namespace dpcore
