// See device_side.h.
#include "torch_backend/device_side.h"

#include "comm/base/error.h"
#include "cuda/device_choice.h"
#include "torch_backend/python_lock.h"

namespace dpcore {

std::shared_ptr<DeviceGroup> DeviceSide::existing(const at::Device& device) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(device.index());
  return found == groups_.end() ? nullptr : found->second;
}

std::shared_ptr<DeviceGroup> DeviceSide::group(at::Device device, double timeout_s) {
  if (auto there = existing(device)) {
    return there;
  }
  // Whoever makes it asks for signals, for which it needs Python's lock.
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

std::shared_ptr<DeviceGroup> DeviceSide::make(at::Device device, double timeout_s) {
  if (!settings_.refusal.empty()) {
    throw Unsupported(settings_.refusal);
  }
  DeviceChoice choice;
  choice.backend = settings_.backend;
  choice.device_name = settings_.host_uuid ? "host" : device.str();
  choice.uuid = settings_.host_uuid.value_or("");
  choice.options = {timeout_s, settings_.algorithm, settings_.deterministic, interrupt_};
  choice.libraries = settings_.libraries;
  const CurrentDeviceGuard guard(device);
  auto control = host_->split(0, host_->rank(), interrupt_);
  return std::make_shared<DeviceGroup>(start_on_device(std::move(control), choice), device);
}

std::vector<std::shared_ptr<DeviceGroup>> DeviceSide::all() const {
  std::vector<std::shared_ptr<DeviceGroup>> groups;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [index, group] : groups_) {
    groups.push_back(group);
  }
  return groups;
}

void DeviceSide::abort(const std::string& reason) {
  for (const auto& group : all()) {
    group->abort(reason);
  }
}

void DeviceSide::close() {
  for (const auto& group : all()) {
    group->close();
  }
}

}  // namespace dpcore
