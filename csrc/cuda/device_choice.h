// Chooses a group's communicator for devices: NCCL, or our own over mapped memory.
//
// NCCL needs a GPU for each rank, so it is chosen if every rank has one; ranks that share a GPU get
// backend="cuda". Sharing is detected by the hardware's UUID, never by device numbers:
// CUDA_VISIBLE_DEVICES gives every process a cuda:0 of its own.
//
// Before a communicator is made, all ranks exchange what they have and want, so all choose alike. A
// problem of one rank (no GPU, no NCCL, another request) raises on all of them, so that none waits.
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
