// Devices by name.
#include "cuda/device/device.h"

#include "cuda/device/device_host.h"

namespace dpcore {

std::shared_ptr<Device> device_named(const std::string& name, const std::string& uuid) {
  constexpr std::string_view kCuda = "cuda:";
  if (name == "host") {
    return host_device(uuid);
  }
  const std::string number = name.starts_with(kCuda) ? name.substr(kCuda.size()) : "";
  if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) {
    throw Unsupported("device '" + name +
                      "': communicators for devices work on cuda:0, cuda:1, ...");
  }
  return cuda_device(std::stoi(number));
}

#ifndef DPCORE_WITH_CUDA
// What a build without nvcc says when it is asked for a GPU.
std::shared_ptr<Device> cuda_device(int index) {
  throw Unsupported(
      "cuda:" + std::to_string(index) +
      " was asked for, but this dpcore was built without CUDA (nvcc was not found, "
      "or DPCORE_CUDA=0 was set): put nvcc in PATH or set CUDA_HOME, and build again");
}
#endif

}  // namespace dpcore
