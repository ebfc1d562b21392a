// See mapped_communicator.h.
#include "cuda/mapped/mapped_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "cuda/stream/done_flag.h"

namespace dpcore {
namespace {

constexpr size_t kPadBytes = (sizeof(SignalPad) + 4095) / 4096 * 4096;
constexpr auto kNap = std::chrono::milliseconds(1);
constexpr int64_t kDeparturePatienceNs = 1'000'000'000;
// A stream that has not passed by then is stuck in something that no flag ends.
constexpr int64_t kLongestEndNs = 60'000'000'000;
// The host's deadline, which knows more, comes before the kernel's own.
constexpr double kKernelPatience = 1.25;

struct RankInfo {     // what ranks tell each other
  uint64_t page = 0;  // offset in the arena
  char uuid[64] = {};
  char wish[16] = {};
};

// What a rank's region holds.
size_t pad_at(int world) { return static_cast<size_t>(world) * Mailboxes::kBytes; }
size_t stage_at(int world) { return pad_at(world) + kPadBytes; }
size_t region_bytes(int world) {
  return stage_at(world) + PushCollectives::kPushStages * PushCollectives::kPushStageBytes;
}

}  // namespace

std::shared_ptr<MappedCommunicator> MappedCommunicator::start(std::shared_ptr<Communicator> control,
                                                              std::shared_ptr<Device> device,
                                                              Options options) {
  return start(std::move(control), std::move(device), std::move(options),
               std::make_shared<Registrations>());
}

std::shared_ptr<MappedCommunicator> MappedCommunicator::start(
    std::shared_ptr<Communicator> control, std::shared_ptr<Device> device, Options options,
    std::shared_ptr<Registrations> registered) {
  if (control->group().remote() != nullptr) {
    throw Unsupported(
        "backend='cuda' maps memory of the ranks' devices, so they have to share a host; use "
        "backend='nccl' between hosts");
  }
  if (control->world() > kBarrierRanks) {
    throw Unsupported("backend='cuda' is for at most " + std::to_string(kBarrierRanks) + " ranks");
  }
  std::shared_ptr<MappedCommunicator> comm(
      new MappedCommunicator(std::move(control), std::move(device), std::move(options)));
  comm->registered_ = std::move(registered);
  const DeviceGuard here(*comm->device_);
  try {
    comm->meet();
  } catch (const Error& problem) {  // the others would wait for this rank
    comm->watch_->fail(ErrorKind::other, comm->rank(), problem.what());
    throw;
  }
  return comm;
}

MappedCommunicator::MappedCommunicator(std::shared_ptr<Communicator> control,
                                       std::shared_ptr<Device> device, Options options)
    : StreamCommunicator(std::move(control), std::move(device), std::move(options)) {
  watch();
}

MappedCommunicator::~MappedCommunicator() {
  close();
  const bool may_go = !group().failed() && all_peers_leave();
  if (regions_) {
    const bool owner_may_leave = may_go || regions_->kind() != MemoryKind::ipc;
    const bool graph_may_run = has_captured_ && group().failed();  // no thread has waited for it
    const bool peers_are_in_use = !has_passed_ || graph_may_run;
    if (peers_are_in_use || !owner_may_leave) {
      regions_->abandon();
    }
    if (!peers_are_in_use) {
      at_the_end(*device_, [this] { regions_->forget_peers(); });
    }
  }
  if (!may_go) {
    // A rank that is still there, or was stopped and wakes up, may raise flags: never given to
    // another else.
    new std::shared_ptr<std::byte>(std::move(own_page_));
  }
  if (has_passed_) {
    at_the_end(*device_, [this] {
      device_->synchronize(stream_);  // the flag is raised behind the event of the last operation
      registered_.reset();
    });
  } else {
    // What stands in the stream still looks at pages, and to end their registration waits for it.
    new std::shared_ptr<Registrations>(std::move(registered_));
  }
  watch_.reset();
}

// The page of flags may go when no peer's stream looks at it. Ranks usually leave together.
bool MappedCommunicator::all_peers_leave() {
  const int64_t deadline = now_ns() + kDeparturePatienceNs;
  while (!group().all_peers_left()) {
    if (now_ns() > deadline) {
      return false;
    }
    group().endpoint().look_for_deaths();
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

void MappedCommunicator::meet() {
  regions_ =
      std::make_unique<SharedRegions>(control_, device_, options_.interrupt, options_.timeout_s);
  own_page_ = control_->endpoint().arena().allocate(kFlagBytes, kFlagAlignment);
  prepare(*new (own_page_.get()) FlagPage);
  const std::string barrier = agree_on_barrier();
  own_region_ = regions_->add(region_bytes(world()));
  open(barrier);
  // No rank writes to a pad before its rank has prepared it.
  control_->run(Request{}, "auto", options_.interrupt);  // a barrier
}

// Where every rank's flags are, and which barrier the ranks use.
std::string MappedCommunicator::agree_on_barrier() {
  RankInfo own;
  own.page = control_->endpoint().arena().offset_of(own_page_.get(), 1);
  std::strncpy(own.uuid, device_->uuid().c_str(), sizeof(own.uuid) - 1);
  const char* wish = std::getenv("DPCORE_CUDA_SYNC");
  if (wish != nullptr) {
    std::strncpy(own.wish, wish, sizeof(own.wish) - 1);
  }
  const std::vector<RankInfo> infos = control_->hear_all(own, options_.interrupt);
  std::vector<std::string> uuids;
  std::vector<uint64_t> offsets;
  for (const RankInfo& info : infos) {
    uuids.emplace_back(info.uuid);
    offsets.push_back(info.page);
  }
  map_pages(offsets);
  return choose_barrier(uuids, infos.front().wish);  // rank 0's wish counts for all
}

void MappedCommunicator::map_pages(const std::vector<uint64_t>& offsets) {
  for (int r = 0; r < world(); ++r) {
    std::byte* page =
        r == rank() ? own_page_.get() : control_->group().at(r, offsets[static_cast<size_t>(r)]);
    MappedPages mapped = device_->map_host(page, kFlagBytes);
    keep_registered(std::move(mapped.registered));
    pages_.pages.push_back(reinterpret_cast<FlagPage*>(page));
    pages_.on_device.push_back(static_cast<FlagPage*>(mapped.on_device));
  }
}

void MappedCommunicator::keep_registered(std::shared_ptr<void> pages) {
  const std::lock_guard<std::mutex> lock(registered_->mutex);
  registered_->list.push_back(std::move(pages));
}

void MappedCommunicator::open(const std::string& barrier) {
  std::vector<SignalPad*> pads;
  std::vector<std::byte*> stages;
  for (std::byte* region : own_region_->at) {
    pads.push_back(reinterpret_cast<SignalPad*>(region + pad_at(world())));
    stages.push_back(region + stage_at(world()));
  }
  auto pad = std::make_unique<SignalPad>();
  std::fill_n(&pad->arrived[0][0], kBarrierBlocks * kBarrierRanks, kFirstNumber);
  std::fill_n(pad->rounds, kBarrierBlocks, kFirstNumber);
  device_->upload(reinterpret_cast<std::byte*>(pads[static_cast<size_t>(rank())]), pad.get(),
                  sizeof(*pad));
  barrier_ = make_barrier(barrier, pages_, pads);
  mailboxes_ = std::make_unique<Mailboxes>(pages_, own_region_->at);
  pushes_ = std::make_unique<PushCollectives>(pages_, *barrier_, stages);
  if (!barrier_->can_be_captured() && regions_->kind() != MemoryKind::address) {
    auto flag = std::make_shared<DoneFlag>(*device_);  // processes take turns on a GPU
    done_flag_ = flag.get();
    keep_registered(std::move(flag));
  }
  is_open_.store(true);
}

std::string MappedCommunicator::describe() const {
  std::string text = "mapped memory of " + device_->name();
  if (regions_) {
    text += " (" + std::string(name_of(regions_->kind())) + ")";
  }
  return barrier_ ? text + ", barrier: " + barrier_->name() : text;
}

std::map<std::string, uint64_t> MappedCommunicator::paths() {
  const std::lock_guard<std::mutex> lock(calls_);
  std::map<std::string, uint64_t> counted;
  for (size_t path = 0; path < runs_.size(); ++path) {
    if (runs_[path] > 0) {
      counted[std::string(name_of(static_cast<PushPath>(path)))] = runs_[path];
    }
  }
  return counted;
}

std::shared_ptr<std::byte> MappedCommunicator::allocate_shared(size_t bytes) {
  check_usable();
  const DeviceGuard here(*device_);
  return SharedRegions::memory_of(regions_->add(bytes));
}

std::shared_ptr<StreamCommunicator> MappedCommunicator::split(int color, int key) {
  auto control = split_control(color, key);
  return control ? start(std::move(control), device_, options_, registered_) : nullptr;
}

// ---- calls -----------------------------------------------------------------------------------

void MappedCommunicator::plan(Request& request, const std::string& algorithm) {
  const StreamWatch::Trouble before = trouble();  // of a graph, which no thread watches
  if (!before.what.empty()) {
    watch_->fail(before.kind, before.culprit, before.what);
    group().failure().raise();
  }
  planned_ = {};
  AskedAlgorithm asked;
  if (request.collective != Collective::barrier && !request.program) {
    asked = resolve_algorithm(request.collective, algorithm, options_.algorithm);
    if (!asked.literal) {
      planned_ = plan_push(request, asked.name, world(), *regions_);
    }
  }
  if (capturing_) {
    check_captured(request);
  }
  if (request.collective == Collective::barrier) {
    return;
  }
  if (planned_.path != PushPath::none) {
    request.layout ^= layout_of(planned_);
    return;
  }
  if (!request.program) {
    request.program = programs_.of(
        asked.is_open() ? algorithm_of_fewest_bytes(request.collective, world()) : asked.name,
        request.collective, request.root);
  }
  request.algorithm = request.program->hash;
  programs_.check_deterministic(request.program->schedule, request.ordered);
}

// No thread watches what runs in a graph, but what went wrong there is found at the next call.
void MappedCommunicator::check_captured(const Request& request) const {
  const bool is_barrier = request.collective == Collective::barrier;
  if (barrier_->can_be_captured() && (is_barrier || planned_.path != PushPath::none)) {
    return;
  }
  throw Unsupported(
      "backend='cuda' can't capture this into a graph: " +
      std::string(barrier_->can_be_captured()
                      ? "messages and lists of moves go by numbers that the host gives"
                      : "ranks that share a GPU have barriers that the host numbers") +
      "; capture all_reduce, reduce_scatter, all_gather and broadcast with a GPU per rank");
}

void MappedCommunicator::enqueue(const Request& request) {
  barrier_->be_patient(kKernelPatience *
                       (request.timeout_s > 0 ? request.timeout_s : options_.timeout_s));
  if (planned_.path != PushPath::none) {
    ++runs_[static_cast<size_t>(planned_.path)];
    pushes_->run(request, planned_, capturing_);
    return;
  }
  if (request.collective != Collective::barrier) {
    ++runs_[0];
    run_moves(request, *device_, stream_, *mailboxes_,
              [this](size_t bytes) { return scratch(bytes); });
    return;
  }
  if (world() > 1) {
    barrier_->wait();
  }
}

const char* MappedCommunicator::path_of(const Request& request) const {
  if (world() == 1) {
    return path_name::kAlone;
  }
  if (request.collective == Collective::barrier) {
    return path_name::kBarrier;
  }
  return request.program ? path_name::kMoves : name_of(planned_.path, request.collective, world());
}

void MappedCommunicator::enqueue(const std::vector<StreamMessage>& messages) {
  if (capturing_) {
    throw Unsupported("backend='cuda' can't capture messages into a graph");
  }
  mailboxes_->put(messages);
}

// ---- the end ---------------------------------------------------------------------------------

// What this rank has sent has to be taken before it goes.
void MappedCommunicator::release() {
  if (!is_open_) {
    return;
  }
  const int64_t deadline = now_ns() + to_ns(options_.timeout_s);
  for (int r = 0; r < world(); ++r) {
    while (r != rank() && !mailboxes_->is_taken_by(r)) {
      group().endpoint().look_for_deaths();
      if (group().adopt_failure_of_peer() || group().is_dead(r) || now_ns() > deadline) {
        watch_->fail(ErrorKind::peer_lost, r,
                     "rank " + std::to_string(r) + " has not taken what rank " +
                         std::to_string(rank()) + " sent before it left");
        return;
      }
      std::this_thread::sleep_for(kNap);
    }
  }
  if (has_captured_) {
    device_->settle();  // a graph that was started before this is still at the others' memory
  }
  regions_->forget_peers();
}

StreamWatch::Trouble MappedCommunicator::trouble() {
  if (!is_open_ || group().failed() || !barrier_->gave_up()) {
    return {};
  }
  const int late = late_peer();
  // None: the rank that was late has come to one block after another one had given up.
  const std::string whom =
      late < 0 ? "those of the others" : "that of rank " + std::to_string(late);
  return {"a kernel on " + device_->name() + " has waited in vain for " + whom +
              ": it has not come to the operation, or can't be reached",
          ErrorKind::timeout, late};
}

int MappedCommunicator::late_peer() const { return is_open_ ? barrier_->late_peer() : -1; }

// By the thread that finds out that it failed, whatever other threads are in. Words of memory, and
// no lock.
void MappedCommunicator::let_pass() {
  if (!is_open_) {
    return;  // the ranks have not met: nothing waits in the stream
  }
  barrier_->give_up();
  barrier_->let_pass();
  mailboxes_->let_pass();
}

void MappedCommunicator::stop() {
  if (!is_open_) {
    return;
  }
  has_passed_ = false;
  let_pass();  // before anything that may wait for the device's driver
  const DeviceGuard here(*device_);
  std::unique_lock<std::mutex> calls(calls_, std::defer_lock);
  has_passed_ = wait_for_stream(calls, now_ns() + kLongestEndNs, [this] {
    let_pass();  // a peer's stream may have lowered a flag again
  });
}

}  // namespace dpcore
