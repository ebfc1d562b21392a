// The kernels that meet those of other ranks, see MeetsPeers in share_sync.h.
#include "cuda/kernels/kernels_launch.cuh"

namespace dpcore {

void launch_meeting(const DeviceReduction& job, const ShareSync& sync, void* stream) {
  launch_reduction<element::MeetsPeers>(job, sync, static_cast<unsigned>(sync.blocks), stream);
}

void load_meetings() {
  reductions<element::MeetsPeers>().each([](auto kernel) { load(kernel); });
}

}  // namespace dpcore
