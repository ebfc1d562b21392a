// A group's communicators for tensors on devices, beside its communicator on the host.
//
// One is made at the first operation on a device (or at once, if torch was told the device). All
// ranks of the group take part in that, so the first operation on a device must be one that every
// rank calls. cuda/device_choice.h chooses the kind of communicator.
//
// Memory: each has a split of the host's communicator, so a failure on a device does not affect the
// host, nor the reverse. Threads: any, without the GIL; while one thread makes a communicator,
// others wait for it. Communicators live until close().
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/error.h"
#include "comm/communicator.h"
#include "cuda/device_choice.h"
#include "torch_backend/device_group.h"
#include "torch_backend/python_lock.h"

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
  std::shared_ptr<DeviceGroup> group(at::Device device, double timeout_s) {
    if (auto there = existing(device)) {
      return there;
    }
    // The thread that makes it checks for signals, for which it needs the GIL.
    const WithoutPythonLock no_lock;
    const std::lock_guard<std::mutex> one_at_a_time(making_);
    if (auto there = existing(device)) {
      return there;
    }
    auto made = make(device, timeout_s);
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_[device.index()] = made;
    return made;
  }
  // Null when there is none yet.
  std::shared_ptr<DeviceGroup> existing(const at::Device& device) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(device.index());
    return found == groups_.end() ? nullptr : found->second;
  }

  // The communicators that there are.
  std::vector<std::shared_ptr<DeviceGroup>> all() const {
    std::vector<std::shared_ptr<DeviceGroup>> groups;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [index, group] : groups_) {
      groups.push_back(group);
    }
    return groups;
  }
  void abort(const std::string& reason) {
    for (const auto& group : all()) {
      group->communicator().abort(reason);
    }
  }
  void close() {
    for (const auto& group : all()) {
      group->communicator().close();
    }
  }

 private:
  std::shared_ptr<DeviceGroup> make(at::Device device, double timeout_s) {
    if (!settings_.refusal.empty()) {
      throw Unsupported(settings_.refusal);
    }
    DeviceChoice choice;
    choice.backend = settings_.backend;
    choice.device_name = settings_.host_uuid ? "host" : device.str();
    choice.uuid = settings_.host_uuid.value_or("");
    choice.options = {timeout_s, settings_.algorithm, settings_.deterministic, interrupt_};
    choice.libraries = settings_.libraries;
    auto control = host_->split(0, host_->rank(), interrupt_);
    return std::make_shared<DeviceGroup>(start_on_device(std::move(control), choice), device);
  }

  std::shared_ptr<Communicator> host_;
  Settings settings_;
  Engine::Interrupt interrupt_;
  std::mutex making_;                                   // one thread makes a communicator
  mutable std::mutex mutex_;                            // guards the map, for a few instructions
  std::map<int, std::shared_ptr<DeviceGroup>> groups_;  // by index of the device
};

}  // namespace dpcore
