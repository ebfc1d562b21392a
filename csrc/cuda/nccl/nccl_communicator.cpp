// Creates and closes NCCL communicators, and handles NCCL's errors in between. The collectives are
// in nccl_collectives.cpp.
#include "cuda/nccl/nccl_communicator.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "cuda/nccl/nccl_types.h"

namespace dpcore {
namespace {

constexpr auto kNap = std::chrono::microseconds(20);
// A thread of NCCL's own does what a call asks for, within some tens of microseconds as a rule: a
// nap would be longer.
constexpr int64_t kBriefNs = 200'000;
// A thread in a call sees a failure at its next poll, unless the call itself does not come back.
constexpr int64_t kCallPatienceNs = 2'000'000'000;
constexpr int kSharesGpuFrom = 23003;  // NCCL 2.30.3

// NCCL_ALGO while communicators that want it are made. The variable belongs to the process: two
// threads may hold it at once when they want the same.
class AlgorithmInEnvironment {
 public:
  explicit AlgorithmInEnvironment(const std::string& value) : holds_(!value.empty()) {
    if (!holds_) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (holders_ > 0 && value != wanted_) {
      throw Error("another communicator is just being made with NCCL_ALGO=" + wanted_ +
                  "; make communicators of different algorithms one after the other");
    }
    if (holders_++ == 0) {
      const char* old = std::getenv(kName);
      before_ = old == nullptr ? std::nullopt : std::optional<std::string>(old);
      wanted_ = value;
      setenv(kName, value.c_str(), 1);
    }
  }
  ~AlgorithmInEnvironment() {
    if (!holds_) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--holders_ > 0) {
      return;
    }
    if (before_) {
      setenv(kName, before_->c_str(), 1);
    } else {
      unsetenv(kName);
    }
  }

 private:
  static constexpr const char* kName = "NCCL_ALGO";
  static inline std::mutex mutex_;
  static inline int holders_ = 0;
  static inline std::string wanted_;
  static inline std::optional<std::string> before_;
  bool holds_;
};

// From 2.24 on a value without a function is for all of them, and not all have a tree.
std::string environment_of(const std::string& algorithm, int version) {
  if (algorithm == "ring") {
    return "Ring";
  }
  if (algorithm == "tree") {
    return version >= 22400 ? "Ring;allreduce:Tree" : "Tree";
  }
  return "";
}

struct RankInfo {  // what ranks tell each other before they meet
  int version = 0;
  char uuid[60] = {};
};

}  // namespace

std::shared_ptr<NcclCommunicator> NcclCommunicator::start(std::shared_ptr<Communicator> control,
                                                          std::shared_ptr<Device> device,
                                                          Options options,
                                                          const std::vector<std::string>& wheels) {
  const std::string& algorithm = options.algorithm;
  if (algorithm != "auto" && environment_of(algorithm, 0).empty() &&
      !algorithm.ends_with("/moves")) {
    throw Unsupported("algorithm '" + algorithm + "': NCCL has 'auto', 'ring' and 'tree'; '" +
                      algorithm + "/moves' is dpcore's own over NCCL's messages, if it exists");
  }
  const nccl::Library& library = nccl::library(wheels);
  std::shared_ptr<NcclCommunicator> comm(
      new NcclCommunicator(std::move(control), std::move(device), std::move(options), library));
  comm->meet();
  return comm;
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<Communicator> control,
                                   std::shared_ptr<Device> device, Options options,
                                   const nccl::Library& library)
    : StreamCommunicator(std::move(control), std::move(device), std::move(options)),
      library_(library) {
  watch();
}

NcclCommunicator::~NcclCommunicator() {
  close();
  watch_.reset();
}

void NcclCommunicator::meet() {
  compare_with_others();
  try {
    exchange_and_connect();
  } catch (const Error& problem) {  // the others would wait for this rank
    watch_->fail(ErrorKind::other, rank(), problem.what());
    throw;
  }
}

void NcclCommunicator::exchange_and_connect() {
  nccl::UniqueId id{};
  if (rank() == 0) {
    check(library_.GetUniqueId(&id), "ncclGetUniqueId");
  }
  Request request;
  request.collective = Collective::broadcast;
  request.output = reinterpret_cast<std::byte*>(&id);
  request.input = request.output;
  request.count = sizeof(id);
  control_->run(std::move(request), "auto", options_.interrupt);
  connect(id);
}

void NcclCommunicator::compare_with_others() {
  RankInfo own;
  own.version = library_.version;
  device_->uuid().copy(own.uuid, sizeof(own.uuid) - 1);
  const std::vector<RankInfo> infos = control_->hear_all(own, options_.interrupt);
  const char* allowed = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const bool may_share =
      library_.version >= kSharesGpuFrom && allowed != nullptr && std::strcmp(allowed, "1") == 0;
  for (int a = 0; a < world(); ++a) {
    if (infos[a].version != infos[0].version) {
      throw RendezvousError("rank 0 found NCCL " + nccl::version_text(infos[0].version) +
                            ", rank " + std::to_string(a) + " found " +
                            nccl::version_text(infos[a].version) +
                            "; set DPCORE_NCCL_LIBRARY to the same on all ranks (this is rank " +
                            std::to_string(rank()) + " with " + describe() + ")");
    }
    for (int b = 0; b < a && !may_share; ++b) {
      if (std::strcmp(infos[a].uuid, infos[b].uuid) == 0) {
        throw Unsupported("ranks " + std::to_string(b) + " and " + std::to_string(a) +
                          " are on one GPU, which " + describe() +
                          " refuses: give each rank a GPU of its own (torch.cuda.set_device), "
                          "or use NCCL 2.30.3 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1");
      }
    }
  }
}

void NcclCommunicator::connect(const nccl::UniqueId& id) {
  const AlgorithmInEnvironment held(environment_of(options_.algorithm, library_.version));
  const std::lock_guard<std::mutex> lock(calls_);
  const DeviceGuard here(*device_);
  nccl::Config config;
  nccl::CommPtr comm = nullptr;
  const int result = library_.CommInitRankConfig(&comm, world(), id, rank(), &config);
  comm_ = comm;
  if (result != nccl::kSuccess && result != nccl::kInProgress) {
    throw Error(failure_of("ncclCommInitRankConfig", result));
  }
  settle("ncclCommInitRankConfig", now_ns() + to_ns(options_.timeout_s));
}

std::shared_ptr<StreamCommunicator> NcclCommunicator::split(int color, int key) {
  auto control = split_control(color, key);
  if (!control) {
    return nullptr;
  }
  std::shared_ptr<NcclCommunicator> part(
      new NcclCommunicator(std::move(control), device_, options_, library_));
  part->meet();
  return part;
}

// ---- errors and the end ----------------------------------------------------------------------

std::string NcclCommunicator::failure_of(const char* call, int result) const {
  return describe() + ", " + call + ": " + last_error(result);
}

std::string NcclCommunicator::last_error(int result) const {
  std::string text = library_.GetErrorString(result);
  const char* detail = library_.GetLastError(nullptr);
  if (detail != nullptr && *detail != '\0') {
    text += std::string(": ") + detail;
  }
  return text + " (NCCL_DEBUG=INFO says more)";
}

void NcclCommunicator::check(int result, const char* call) {
  if (result == nccl::kInProgress) {
    settle(call, now_ns() + to_ns(options_.timeout_s));
  } else if (result != nccl::kSuccess) {
    throw Error(failure_of(call, result));
  }
}

int NcclCommunicator::asynchronous_state() {
  int state = nccl::kSuccess;
  const int result = library_.CommGetAsyncError(comm_, &state);
  return result != nccl::kSuccess ? result : state;
}

// Until NCCL has done what a call began.
void NcclCommunicator::settle(const char* call, int64_t deadline_ns) {
  const int64_t brief_until_ns = now_ns() + kBriefNs;
  while (true) {
    if (comm_ == nullptr) {
      group().failure().raise();  // it was aborted from under the call
    }
    const int state = asynchronous_state();
    if (state == nccl::kSuccess) {
      return;
    }
    if (state != nccl::kInProgress) {
      throw Error(failure_of(call, state));
    }
    if (now_ns() < brief_until_ns) {
      std::this_thread::yield();
      continue;
    }
    if (group().fails_during(std::string("during ") + call)) {
      group().failure().raise();
    }
    if (now_ns() > deadline_ns) {
      watch_->fail(ErrorKind::timeout, -1,
                   std::string(call) + " of " + describe() + " has waited " +
                       std::to_string(options_.timeout_s) +
                       " s for other ranks; pass timeout= if it only needs longer");
      group().failure().raise();
    }
    if (options_.interrupt) {
      options_.interrupt();
    }
    std::this_thread::sleep_for(kNap);
  }
}

StreamWatch::Trouble NcclCommunicator::trouble() {
  const std::unique_lock<std::mutex> lock(calls_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr) {
    return {};  // a thread in a call checks itself
  }
  const int state = asynchronous_state();
  const bool fine = state == nccl::kSuccess || state == nccl::kInProgress;
  return fine ? StreamWatch::Trouble{}
              : StreamWatch::Trouble{describe() + " reports: " + last_error(state)};
}

// A call may wait for room in the stream's queue, which there is only when the abort has come: it
// is not waited for without end. NCCL lets one thread abort what another one is in.
void NcclCommunicator::stop() {
  std::unique_lock<std::mutex> calls(calls_, std::defer_lock);
  const int64_t deadline = now_ns() + kCallPatienceNs;
  while (!calls.try_lock() && now_ns() < deadline) {
    std::this_thread::sleep_for(kNap);
  }
  const nccl::CommPtr comm = comm_.exchange(nullptr);
  if (comm == nullptr) {
    return;
  }
  if (has_captured_) {
    // NCCL ends a communicator only after the last graph that has captured its kernels, so the
    // abort is left to a thread that may never end. What is in flight ends all the same.
    std::thread([abort = library_.CommAbort, comm] { abort(comm); }).detach();
  } else {
    library_.CommAbort(comm);
  }
  // An abort ends what NCCL does. The copies and reductions behind it in the stream still run, on
  // memory that belongs to the program again once its operations count as failed.
  const DeviceGuard here(*device_);
  wait_for_stream(calls, now_ns() + kCallPatienceNs, [] {});
}

void NcclCommunicator::release() {
  const std::lock_guard<std::mutex> lock(calls_);
  if (comm_ == nullptr) {
    return;
  }
  if (has_captured_) {  // a graph may keep it, and it would be waited for: it ends with the process
    comm_ = nullptr;
    return;
  }
  bool is_final = true;
  try {
    check(library_.CommFinalize(comm_), "ncclCommFinalize");
  } catch (const Error&) {  // a peer left early: nothing of it is needed any more
    is_final = false;
  }
  const nccl::CommPtr comm = comm_.exchange(nullptr);
  if (comm != nullptr) {
    (is_final ? library_.CommDestroy : library_.CommAbort)(comm);
  }
}

std::shared_ptr<void> NcclCommunicator::register_memory(std::byte* memory, size_t bytes) {
  check_usable();
  if (library_.CommRegister == nullptr || library_.CommDeregister == nullptr || bytes == 0) {
    return nullptr;
  }
  // It only saves time: memory that NCCL can't register is used as it is.
  void* handle = nullptr;
  {
    const std::lock_guard<std::mutex> lock(calls_);
    const DeviceGuard here(*device_);
    const int result = library_.CommRegister(comm_, memory, bytes, &handle);
    if (result != nccl::kSuccess && result != nccl::kInProgress) {
      return nullptr;
    }
    check(result, "ncclCommRegister");
  }
  if (handle == nullptr) {
    return nullptr;
  }
  const auto deregister = [me = weak_from_this()](void* handle) {
    const auto alive = std::static_pointer_cast<NcclCommunicator>(me.lock());
    if (!alive) {
      return;
    }
    const std::lock_guard<std::mutex> lock(alive->calls_);
    if (alive->comm_ != nullptr) {
      alive->library_.CommDeregister(alive->comm_, handle);
    }
  };
  return {handle, deregister};
}

// ---- which algorithm -------------------------------------------------------------------------

void NcclCommunicator::plan(Request& request, const std::string& algorithm) {
  if (request.collective == Collective::barrier) {
    return;
  }
  if (!request.program) {
    const AskedAlgorithm asked =
        resolve_algorithm(request.collective, algorithm, options_.algorithm);
    if (asked.literal) {
      request.program = programs_.of(asked.name, request.collective, request.root);
    } else if (!asked.is_open() && asked.name != options_.algorithm) {
      throw Unsupported("algorithm '" + asked.name +
                        "': NCCL takes 'ring' or 'tree' when the communicator is made "
                        "(dpcore.init(algorithm=...)), or chooses itself ('auto'); '" +
                        asked.name + "/moves' is dpcore's own over NCCL's messages");
    } else if (reduces(request.collective) &&
               (options_.deterministic ||
                !nccl::reduction_of(request.dtype, request.op).has_value())) {
      request.program = programs_.of(algorithm_of_fewest_bytes(request.collective, world()),
                                     request.collective, request.root);
    }
  }
  if (!request.program) {
    return;
  }
  request.algorithm = request.program->hash;
  programs_.check_deterministic(request.program->schedule, request.ordered);
}

}  // namespace dpcore
