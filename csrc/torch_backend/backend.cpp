// Construction, memory, groups and shutdown of the backend.
#include "torch_backend/backend.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <numeric>

#include "comm/base/error.h"
#include "tensors/tensor_memory.h"
#include "torch_backend/python_lock.h"

namespace dpcore {
namespace {

// The backend's allocator for torch: it gives memory of the arena.
class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto* owner = new std::shared_ptr<std::byte>(communicator_->allocate(bytes));
    return {owner->get(), owner, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* owner) { delete static_cast<std::shared_ptr<std::byte>*>(owner); }

  std::shared_ptr<Communicator> communicator_;
};

// torch leaves the list empty for the group of all ranks.
FlightLog::Ranks ranks_of(const TorchBackend::Options& options, int world) {
  std::vector<uint64_t> ranks = options.global_ranks_in_group;
  if (ranks.empty()) {
    ranks.resize(static_cast<size_t>(world));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  return std::make_shared<const std::vector<uint64_t>>(std::move(ranks));
}

// What dpcore.errors.on_its_way() says. torch calls shutdown() without Python's lock.
std::string exception_on_its_way() {
  const PyGILState_STATE before = PyGILState_Ensure();
  PyObject* errors = PyImport_ImportModule("dpcore.errors");
  PyObject* said = errors == nullptr ? nullptr : PyObject_CallMethod(errors, "on_its_way", nullptr);
  const char* text = said == nullptr ? nullptr : PyUnicode_AsUTF8(said);
  std::string problem = text == nullptr ? "" : text;
  Py_XDECREF(said);
  Py_XDECREF(errors);
  PyErr_Clear();
  PyGILState_Release(before);
  return problem;
}

void leave(DeviceSide& devices, BackendState& state) {
  const WithoutPythonLock no_lock;
  devices.close();
  state.communicator->close();
  state.callbacks.stop();
}

}  // namespace

TorchBackend::TorchBackend(std::shared_ptr<Communicator> communicator, StorePtr store,
                           c10::intrusive_ptr<Options> options, Engine::Interrupt interrupt,
                           DeviceSide::Settings device)
    : Backend(communicator->rank(), communicator->world()),
      state_(std::make_shared<BackendState>()),
      store_(std::move(store)),
      options_(std::move(options)),
      ranks_(ranks_of(*options_, communicator->world())),
      devices_(communicator, std::move(device), interrupt) {
  state_->communicator = std::move(communicator);
  state_->interrupt = std::move(interrupt);
  init();
}

TorchBackend::~TorchBackend() { leave(devices_, *state_); }

at::Tensor TorchBackend::allocateTensor(long size, at::TensorOptions options) {
  if (devices_.takes(options.device())) {
    const auto group = devices_.existing(options.device());
    return group ? group->allocate(size, options) : at::empty({size}, options);
  }
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  if (c10::isComplexType(type)) {
    throw Unsupported(
        "torch's DistributedDataParallel can't put complex gradients into a backend's memory: set "
        "DDP_DISABLE_COMM_MEM=1 in the environment, or wrap the model in dpcore.DataParallel");
  }
  const size_t bytes = static_cast<size_t>(size) * c10::elementSize(type);
  return tensor_over(state_->communicator->allocate(bytes), {size}, type);
}

std::shared_ptr<c10::Allocator> TorchBackend::getMemAllocator() {
  return std::make_shared<ArenaAllocator>(state_->communicator);
}

c10::intrusive_ptr<c10d::Backend> TorchBackend::split(const StorePtr& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), getRank());
  const bool is_member = found != ranks.end();
  auto part = state_->communicator->split(
      is_member ? ranks.front() : -1, static_cast<int>(found - ranks.begin()), state_->interrupt);
  if (!part) {
    return nullptr;
  }
  auto own = c10::make_intrusive<Options>("dpcore", options ? options->timeout : options_->timeout);
  if (options) {
    own->group_name = options->group_name;
    own->group_desc = options->group_desc;
  }
  for (const int rank : ranks) {
    const auto& global = options_->global_ranks_in_group;
    own->global_ranks_in_group.push_back(global.empty() ? static_cast<uint64_t>(rank)
                                                        : global[static_cast<size_t>(rank)]);
  }
  return c10::make_intrusive<TorchBackend>(std::move(part), store, std::move(own),
                                           state_->interrupt, devices_.settings());
}

bool TorchBackend::supportsCoalescing() const {
  return devices_.settings().host_uuid || c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA);
}

void TorchBackend::eagerConnectSingleDevice(at::Device device) { group_on(device); }

c10d::ErrorType TorchBackend::getError() {
  const Group* failed =
      state_->communicator->group().failed() ? &state_->communicator->group() : nullptr;
  for (const auto& group : devices_.all()) {
    if (failed == nullptr && group->communicator().group().failed()) {
      failed = &group->communicator().group();
    }
  }
  if (failed == nullptr) {
    return c10d::ErrorType::SUCCESS;
  }
  switch (failed->failure().get().record.kind) {
    case ErrorKind::timeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::peer_lost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void TorchBackend::abort() {
  constexpr const char* kReason = "its program aborted the process group";
  const WithoutPythonLock no_lock;
  devices_.abort(kReason);
  state_->communicator->abort(kReason);
}

void TorchBackend::shutdown() {
  if (const std::string problem = exception_on_its_way(); !problem.empty()) {
    state_->communicator->endpoint().record_program_error(problem);
  }
  leave(devices_, *state_);
}

}  // namespace dpcore
