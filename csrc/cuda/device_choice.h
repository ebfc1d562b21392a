// Which communicator carries a group's operations on devices: NCCL, or our own over mapped memory.
//
// NCCL wants a GPU for each rank, so that is the choice where every rank has one; ranks that share
// a GPU get backend="cuda". Whether they share shows by the identity of the hardware, never by
// numbers: CUDA_VISIBLE_DEVICES gives every process a cuda:0 of its own.
//
// All ranks tell each other what they have and what they want before anything is made, so all
// choose alike, and what is wrong on one rank (no GPU, no NCCL, another wish) raises on all of them
// instead of leaving the others to wait.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/stream/stream_communicator.h"

namespace dpcore {

struct DeviceChoice {
  std::string backend = "auto";  // "auto", "nccl", "cuda"
  std::string device_name;       // "cuda:0"; "host": the device of the tests, with this uuid
  std::string uuid;
  StreamCommunicator::Options options;
  std::vector<std::string> libraries;  // where NCCL may be
};

// All ranks of `control` call it; `control` belongs to the result, and is closed when there is
// none.
std::shared_ptr<StreamCommunicator> start_on_device(std::shared_ptr<Communicator> control,
                                                    const DeviceChoice& choice);

}  // namespace dpcore
