// Life, memory, and the way of a call: numbers it, writes it into the flight log, runs or submits
// its requests.
#include "torch_backend/backend.h"

#include <Python.h>

#include "comm/error.h"
#include "reducer/tensor_memory.h"
#include "torch_backend/flight_log.h"

namespace dpcore {
namespace {

// Memory of the arena for whoever asks torch for the backend's allocator.
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

// Ends what may still wait for Python's lock, without holding it.
class WithoutPythonLock {
 public:
  WithoutPythonLock() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      held_ = PyEval_SaveThread();
    }
  }
  ~WithoutPythonLock() {
    if (held_ != nullptr) {
      PyEval_RestoreThread(held_);
    }
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  PyThreadState* held_ = nullptr;
};

// What torchfrtrace knows a backend of CPU tensors by.
std::string flight_name(const char* title) {
  const std::string text(title);
  return "gloo" + text.substr(text.find(':'));
}

}  // namespace

TorchBackend::TorchBackend(std::shared_ptr<Communicator> communicator, StorePtr store,
                           c10::intrusive_ptr<Options> options, Engine::Interrupt interrupt)
    : Backend(communicator->rank(), communicator->world()),
      state_(std::make_shared<BackendState>()),
      store_(std::move(store)),
      options_(std::move(options)) {
  state_->communicator = std::move(communicator);
  state_->interrupt = std::move(interrupt);
  init();
}

TorchBackend::~TorchBackend() { shutdown(); }

double TorchBackend::seconds(std::chrono::milliseconds timeout) const {
  const auto wanted = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout;
  return static_cast<double>(wanted.count()) / 1e3;
}

c10::intrusive_ptr<TorchWork> TorchBackend::make_work(Call& call, std::string name,
                                                      bool is_message) {
  FlightLog::Entry entry;
  entry.group = getGroupUid();
  entry.description = getGroupDesc();
  entry.collective = collectives_;
  entry.message = messages_;
  entry.operation = is_message ? ++messages_ : ++collectives_;
  (is_message ? entry.message : entry.collective) = entry.operation;
  entry.name = std::move(name);
  entry.timeout_ms = static_cast<int64_t>(seconds(call.timeout) * 1e3);
  entry.is_message = is_message;
  const uint64_t flight = FlightLog::of_process().add(entry, call.inputs, call.outputs);
  const TorchWork::What what{call.type, call.title, entry.operation, flight};
  return c10::make_intrusive<TorchWork>(state_, what, call.inputs, std::move(call.outputs),
                                        std::move(call.staging));
}

TorchBackend::WorkPtr TorchBackend::perform(Call&& call) {
  auto work = make_work(call, flight_name(call.title), false);
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

at::Tensor TorchBackend::allocateTensor(long size, at::TensorOptions options) {
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  const size_t bytes = static_cast<size_t>(size) * c10::elementSize(type);
  return tensor_over(state_->communicator->allocate(bytes), {size}, type);
}

std::shared_ptr<c10::Allocator> TorchBackend::getMemAllocator() {
  return std::make_shared<ArenaAllocator>(state_->communicator);
}

c10::intrusive_ptr<c10d::Backend> TorchBackend::split(const StorePtr& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), getRank());
  const bool is_member = place != ranks.end();
  auto part = state_->communicator->split(
      is_member ? ranks.front() : -1, static_cast<int>(place - ranks.begin()), state_->interrupt);
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
                                           state_->interrupt);
}

c10d::ErrorType TorchBackend::getError() {
  Group& group = state_->communicator->group();
  if (!group.failed()) {
    return c10d::ErrorType::SUCCESS;
  }
  switch (group.failure().kind) {
    case ErrorKind::timeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::peer_lost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void TorchBackend::abort() {
  const WithoutPythonLock no_lock;
  state_->communicator->abort("its program aborted the process group");
}

void TorchBackend::shutdown() {
  const WithoutPythonLock no_lock;
  state_->communicator->close();
  state_->callbacks.stop();
}

}  // namespace dpcore
