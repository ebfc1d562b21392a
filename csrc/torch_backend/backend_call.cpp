// The path of a call: it gets a number and an entry in the flight log, then its requests run, are
// submitted, or go into the stream of a device.
#include "comm/base/error.h"
#include "torch_backend/backend.h"
#include "torch_backend/flight_log.h"

#include <torch/version.h>

namespace dpcore {
namespace {

// torchfrtrace stops at the name of a backend that it does not know; torch 2.11's knows none of
// the CPU.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
constexpr bool kIsNcclOnCpu = true;
#else
constexpr bool kIsNcclOnCpu = false;
#endif

// Its names for what NCCL makes of parts of different sizes. Under all_gather and reduce_scatter it
// would take them for a mistake.
constexpr const char* kUnevenGather = "_broadcast_oop";
constexpr const char* kUnevenScatter = "_reduce_oop";
constexpr const char* kBarrierOfNccl = "all_reduce_barrier";

std::string name_for_analysis(const std::string& name, bool on_device) {
  if (!on_device && !kIsNcclOnCpu) {
    return "gloo:" + name;
  }
  return "nccl:" + (name == "barrier" ? kBarrierOfNccl : name);
}

void check_one_device(const std::vector<at::Tensor>& tensors, const at::Device& device,
                      const char* title) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() != device) {
      throw Unsupported(std::string(title) + ": tensors are on " + device.str() + " and " +
                        tensor.device().str() + "; those of one call have to be on one device");
    }
  }
}

}  // namespace

double TorchBackend::seconds(std::chrono::milliseconds timeout) const {
  const auto wanted = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
  return static_cast<double>(wanted.count()) / 1e3;
}

Staging TorchBackend::staging_for(at::Device device) const {
  return devices_.takes(device) ? Staging(device) : Staging(state_->communicator);
}

std::shared_ptr<DeviceGroup> TorchBackend::group_on(at::Device device) {
  return devices_.group(device, seconds(c10d::kUnsetTimeout));
}

TorchWork::What TorchBackend::announce(const Call& call, const std::string& name, bool is_message) {
  FlightLog::Entry entry;
  entry.ranks = ranks_;
  entry.group = getGroupUid();
  entry.description = getGroupDesc();
  entry.collective = collectives_;
  entry.message = messages_;
  entry.operation = is_message ? ++messages_ : ++collectives_;
  (is_message ? entry.message : entry.collective) = entry.operation;
  entry.name =
      name_for_analysis(call.uneven ? (call.lists_outputs ? kUnevenGather : kUnevenScatter) : name,
                        devices_.takes(call.device));
  entry.timeout_ms = static_cast<int64_t>(seconds(call.timeout) * 1e3);
  entry.is_message = is_message;
  const auto world = static_cast<size_t>(getSize());
  // torchfrtrace wants the same shapes on every rank: where parts differ, it gets all parts.
  const FlightLog::Shown inputs{call.inputs, call.lists_inputs ? world : 0};
  const FlightLog::Shown outputs{call.outputs, call.lists_outputs ? world : 0};
  const FlightLog::Shown parts{call.lists_outputs ? call.outputs : call.inputs};
  const uint64_t operation = entry.operation;
  const uint64_t flight = FlightLog::of_process().add(
      std::move(entry), call.uneven ? parts : inputs, call.uneven ? parts : outputs);
  return {call.type, call.title, operation, flight};
}

c10::intrusive_ptr<TorchWork> TorchBackend::make_work(Call& call, const std::string& name,
                                                      bool is_message) {
  const TorchWork::What what = announce(call, name, is_message);
  return c10::make_intrusive<TorchWork>(state_, what, call.inputs, std::move(call.outputs),
                                        std::move(call.staging));
}

c10::intrusive_ptr<DeviceWork> TorchBackend::make_device_work(Call& call, const std::string& name,
                                                              bool is_message) {
  auto group = group_on(call.device);
  const TorchWork::What what = announce(call, name, is_message);
  return c10::make_intrusive<DeviceWork>(state_, std::move(group), what, call.inputs,
                                         std::move(call.outputs), std::move(call.staging));
}

TorchBackend::WorkPtr TorchBackend::perform(Call&& call) {
  check_one_device(call.inputs, call.device, call.title);
  check_one_device(call.outputs, call.device, call.title);
  Batch* const open = batch();
  call.asynchronous = call.asynchronous || open != nullptr;
  auto work = devices_.takes(call.device) ? perform_on_device(std::move(call), false)
                                          : perform_on_host(std::move(call));
  if (open != nullptr) {
    open->works.push_back(work);
  }
  return work;
}

TorchBackend::WorkPtr TorchBackend::perform_on_host(Call&& call) {
  const std::string title(call.title);
  auto work = make_work(call, title.substr(title.find(':') + 1), false);
  const double timeout = seconds(call.timeout);
  Communicator& core = *state_->communicator;
  std::vector<dpcore::Work> operations;
  try {
    for (Request& request : call.requests) {
      request.timeout_s = timeout;
      if (call.asynchronous) {
        operations.push_back(core.submit(std::move(request), {}));
      } else {
        core.run(std::move(request), {}, state_->interrupt);
      }
    }
  } catch (...) {
    if (operations.empty()) {
      work->settle(std::current_exception());
    } else {
      work->follow(std::move(operations));  // what was submitted before keeps its tensors
    }
    throw;
  }
  work->follow(std::move(operations));
  return work;
}

TorchBackend::WorkPtr TorchBackend::perform_on_device(Call&& call, bool holds_host) {
  const std::string title(call.title);
  const auto group = group_on(call.device);
  const double timeout = seconds(call.timeout);
  auto work = make_device_work(call, title.substr(title.find(':') + 1), false);
  if (holds_host) {
    work->hold_the_host();
  }
  if (call.requests.empty()) {  // a list without tensors
    work->started(group->submit(std::vector<StreamMessage>{}, timeout));
    return work;
  }
  DeviceGroup::Work last;
  try {
    for (Request& request : call.requests) {
      request.timeout_s = timeout;
      last = group->submit(std::move(request));
    }
  } catch (...) {
    if (last) {
      work->started(std::move(last));  // what was submitted before keeps its tensors
    } else {
      work->refused();
    }
    throw;
  }
  work->started(std::move(last));
  if (!call.asynchronous) {
    work->wait(kNoTimeout);
  }
  return work;
}

void TorchBackend::run_now(Request request, at::Device device) {
  if (!devices_.takes(device)) {
    state_->communicator->run(std::move(request), {}, state_->interrupt);
    return;
  }
  const auto group = group_on(device);
  group->order(group->submit(std::move(request)), group->current_stream());
}

}  // namespace dpcore
