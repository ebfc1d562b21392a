// How an operation enters where ranks share no memory: with a frame to each of them.
//
// What this rank wrote into its slot travels, and with it the part of its stage that the peer
// would read there: a small operation is over with one frame each way, and the code that runs it
// is the one for mapped memory. Larger data follows by the transport once all have entered.
#include "comm/operations/collective_operation.h"

namespace dpcore {

void CollectiveOperation::tell_remote_members() {
  RemoteMembers& remote = *group_->remote();
  const std::byte* stage = is_prefilled_ ? stage_of(me()) : nullptr;
  for (int r = 0; r < world(); ++r) {
    if (!remote.contains(r)) {
      continue;
    }
    size_t begin = 0;
    size_t bytes = 0;
    if (is_small_ && publishes() && consumes(r)) {
      begin = static_cast<size_t>(stage_buffer(me(), 0, r, stage_quota()) - stage);
      bytes = outgoing(r).elements * element_;
    } else if (announces_parts_) {
      bytes = static_cast<size_t>(world()) * sizeof(uint64_t);
    }
    remote.tell_post(r, own_slot(), bytes_, stage, begin, bytes);
  }
}

}  // namespace dpcore
