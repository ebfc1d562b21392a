// A group's communicators for tensors on devices, beside the one that it has on the host.
//
// Made when the first operation on a device comes (or at once, when torch was told the device):
// then all ranks of the group meet on it, so the first operation on a device has to be one in which
// every rank takes part. Which communicator it becomes: cuda/device_choice.h.
//
// Memory: each has a part of the host's communicator for itself, so that a failure on a device and
// one on the host stay apart. Threads: any, without Python's lock; who comes while another thread
// makes a communicator waits for it. Communicators live until close().
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "torch_backend/device_group.h"

namespace dpcore {

class DeviceSide {
 public:
  struct Settings {
    std::string backend = "auto";
    std::string algorithm = "auto";
    bool deterministic = false;
    std::vector<std::string> libraries;  // where NCCL may be
    // Tests: tensors of the CPU count as tensors of a device of the host with this uuid.
    std::optional<std::string> host_uuid;
    std::string refusal;  // why there is no communicator for devices; empty: there is
  };

  DeviceSide(std::shared_ptr<Communicator> host, Settings settings, Engine::Interrupt interrupt)
      : host_(std::move(host)), settings_(std::move(settings)), interrupt_(std::move(interrupt)) {}

  const Settings& settings() const { return settings_; }
  bool takes(const at::Device& device) const {
    return settings_.host_uuid ? device.is_cpu() : device.is_cuda();
  }
  // Of all ranks; waits for them when it is the first time. `timeout_s` is that of the group.
  std::shared_ptr<DeviceGroup> group(at::Device device, double timeout_s);
  // Null when there is none yet.
  std::shared_ptr<DeviceGroup> existing(const at::Device& device) const;

  // The communicators that there are.
  std::vector<std::shared_ptr<DeviceGroup>> all() const;
  void abort(const std::string& reason);
  void close();

 private:
  std::shared_ptr<DeviceGroup> make(at::Device device, double timeout_s);

  std::shared_ptr<Communicator> host_;
  Settings settings_;
  Engine::Interrupt interrupt_;
  std::mutex making_;                                   // one thread makes a communicator
  mutable std::mutex mutex_;                            // guards the map, for a few instructions
  std::map<int, std::shared_ptr<DeviceGroup>> groups_;  // by index of the device
};

}  // namespace dpcore
