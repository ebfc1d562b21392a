// See shared_regions.h.
#include "cuda/mapped/shared_regions.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/memory/unix_socket.h"

namespace dpcore {
namespace {

constexpr int kDroppedAtOnce = 32;
constexpr size_t kNameBytes = 64;

struct Hello {
  MemorySupport support;
  char wish[32] = {};
};

// Memory that ranks of this process have offered to each other: an address says where it is, and
// this table which rank keeps it there.
struct Offers {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<std::byte>> memory;
};

Offers& offers() {
  static auto* it = new Offers;
  return *it;
}

std::shared_ptr<std::byte> offered_here(std::byte* memory, const std::shared_ptr<Device>& device) {
  const auto address = reinterpret_cast<uint64_t>(memory);
  std::shared_ptr<std::byte> owner(memory, [device, address](std::byte* last) {
    {
      const std::lock_guard<std::mutex> lock(offers().mutex);
      offers().memory.erase(address);
    }
    at_the_end(*device, [&] { device->release_idle(last); });
  });
  const std::lock_guard<std::mutex> lock(offers().mutex);
  offers().memory[address] = owner;
  return owner;
}

// Null for memory of another process.
std::shared_ptr<std::byte> taken_here(const MemoryHandle& handle) {
  if (handle.process != process_mark()) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(offers().mutex);
  const auto found = offers().memory.find(handle.address);
  return found == offers().memory.end() ? nullptr : found->second.lock();
}

}  // namespace

// What ranks tell each other of a region.
struct SharedRegions::RankInfo {
  MemoryHandle handle;
  uint64_t bytes = 0;
  uint64_t dropped[kDroppedAtOnce] = {};  // ids + 1 of what this rank has no use for
  char socket[kNameBytes] = {};           // of rank 0: where descriptors are exchanged
  uint8_t failed = 0;
};

SharedRegion::SharedRegion(std::shared_ptr<Device> of, uint64_t number, size_t size)
    : device(std::move(of)), id(number), bytes(size) {}

SharedRegion::~SharedRegion() {
  if (abandoned) {
    new std::shared_ptr<std::byte>(std::move(memory));
    for (auto& theirs : held) {
      new std::shared_ptr<std::byte>(std::move(theirs));
    }
    return;
  }
  at_the_end(*device, [this] {
    if (is_programs && !settled) {
      device->settle();
    }
    forget_peers();
    memory.reset();
  });
}

void SharedRegion::forget_peers() {
  for (size_t r = 0; r < at.size(); ++r) {
    if (at[r] != nullptr && at[r] != own && !held[r]) {
      device->forget_memory(at[r]);
    }
  }
  at.clear();
  held.clear();
}

SharedRegions::SharedRegions(std::shared_ptr<Communicator> control, std::shared_ptr<Device> device,
                             Engine::Interrupt interrupt, double timeout_s)
    : control_(std::move(control)),
      device_(std::move(device)),
      interrupt_(std::move(interrupt)),
      timeout_s_(timeout_s) {
  const char* wish = std::getenv("DPCORE_CUDA_MEMORY");
  Hello own;
  own.support = device_->memory_support();
  if (wish != nullptr) {
    std::strncpy(own.wish, wish, sizeof(own.wish) - 1);
  }
  const std::vector<Hello> all = control_->hear_all(own, interrupt_);
  std::vector<MemorySupport> supports;
  for (const Hello& hello : all) {
    supports.push_back(hello.support);
  }
  kind_ = choose_memory(supports, all.front().wish);
}

std::shared_ptr<const SharedRegion> SharedRegions::add(size_t bytes) {
  const std::lock_guard<std::mutex> one_at_a_time(adding_);
  auto region = std::make_shared<SharedRegion>(device_, next_id_++, bytes);
  try {
    share(*region);
  } catch (...) {
    // A peer may have opened it, and be about to hear of the failure.
    region->abandoned = kind_ == MemoryKind::ipc;
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  regions_.push_back(region);
  return region;
}

void SharedRegions::share(SharedRegion& region) {
  std::string problem;
  const RankInfo own = offer(region, problem);
  const Descriptor exported(own.handle.descriptor);  // every rank gets a copy
  std::vector<RankInfo> infos = control_->hear_all(own, interrupt_);
  let_go_of_dropped(infos);
  if (std::none_of(infos.begin(), infos.end(),
                   [](const RankInfo& info) { return info.failed != 0; })) {
    try {
      map_peers(region, infos, exported.get());
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  // How it went everywhere. Also the moment from which on no rank has mapped what was let go.
  const uint8_t failed = problem.empty() ? 0 : 1;
  const std::vector<uint8_t> who_failed = control_->hear_all(failed, interrupt_);
  check(infos, who_failed, problem);
}

// Takes the memory. `problem`: why there is none.
SharedRegions::RankInfo SharedRegions::offer(SharedRegion& region, std::string& problem) {
  RankInfo own;
  own.bytes = region.bytes;
  try {
    region.own = device_->allocate_shared(std::max<size_t>(region.bytes, 1), kind_);
    region.memory = offered_here(region.own, device_);
    own.handle = device_->share_memory(region.own);
    if (control_->rank() == 0) {
      std::strncpy(own.socket, secret_socket_name().c_str(), sizeof(own.socket) - 1);
    }
  } catch (const Error& error) {
    problem = error.what();
    own.failed = 1;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  int n = 0;
  for (const auto& known : regions_) {
    if (known->dropped && n < kDroppedAtOnce) {
      own.dropped[n++] = known->id + 1;
    }
  }
  return own;
}

void SharedRegions::map_peers(SharedRegion& region, std::vector<RankInfo>& infos, int exported) {
  std::vector<Descriptor> handles(infos.size());
  if (kind_ == MemoryKind::descriptor && infos.size() > 1) {
    handles =
        exchange_descriptors(infos.front().socket, control_->rank(), control_->world(), exported,
                             now_ns() + static_cast<int64_t>(timeout_s_ * 1e9), interrupt_);
  }
  region.at.assign(infos.size(), nullptr);
  region.held.resize(infos.size());
  for (size_t r = 0; r < infos.size(); ++r) {
    if (static_cast<int>(r) == control_->rank()) {
      region.at[r] = region.own;
      continue;
    }
    infos[r].handle.descriptor = handles[r].get();
    region.held[r] = taken_here(infos[r].handle);
    region.at[r] = device_->map_memory(infos[r].handle);
  }
}

// The same verdict on all ranks.
void SharedRegions::check(const std::vector<RankInfo>& infos,
                          const std::vector<uint8_t>& who_failed, const std::string& problem) {
  for (size_t r = 0; r < infos.size(); ++r) {
    if (infos[r].bytes != infos.front().bytes) {
      throw Mismatch("rank 0 asks for " + std::to_string(infos.front().bytes) +
                     " bytes of shared device memory, rank " + std::to_string(r) + " for " +
                     std::to_string(infos[r].bytes) +
                     ": all ranks have to ask for as much, in the same order");
    }
  }
  if (!problem.empty()) {
    throw Unsupported(problem);
  }
  const auto failed = std::find(who_failed.begin(), who_failed.end(), 1);
  if (failed != who_failed.end()) {
    throw Unsupported("rank " + std::to_string(failed - who_failed.begin()) +
                      " could not take or map " + std::to_string(infos.front().bytes) +
                      " bytes of shared device memory; its own error says why");
  }
}

// Regions that no rank has a use for. All ranks are here, and none goes on before this one has come
// to the end of share(): so waiting for the device waits for no rank, also where ranks are threads
// of one process and share it.
void SharedRegions::let_go_of_dropped(const std::vector<RankInfo>& infos) {
  leaving_.clear();  // by now all have forgotten them
  const auto is_kept = [&](const std::shared_ptr<SharedRegion>& known) {
    return !std::all_of(infos.begin(), infos.end(), [&](const RankInfo& info) {
      return std::find(std::begin(info.dropped), std::end(info.dropped), known->id + 1) !=
             std::end(info.dropped);
    });
  };
  std::vector<std::shared_ptr<SharedRegion>> dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto first = std::stable_partition(regions_.begin(), regions_.end(), is_kept);
    dropped.assign(std::make_move_iterator(first), std::make_move_iterator(regions_.end()));
    regions_.erase(first, regions_.end());
  }
  if (dropped.empty()) {
    return;
  }
  device_->settle();
  for (const auto& region : dropped) {
    region->settled = true;
    region->forget_peers();
  }
  if (kind_ == MemoryKind::ipc) {
    leaving_ = std::move(dropped);
  }
}

std::shared_ptr<std::byte> SharedRegions::memory_of(std::shared_ptr<const SharedRegion> region) {
  std::byte* memory = region->own;
  region->is_programs.store(true);
  return {memory, [keep = std::move(region)](std::byte*) mutable {
            keep->dropped.store(true);
            keep.reset();
          }};
}

SharedRegions::Address SharedRegions::find(const void* memory, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& region : regions_) {
    const auto offset = static_cast<size_t>(static_cast<const std::byte*>(memory) - region->own);
    if (!region->dropped && offset <= region->bytes && bytes <= region->bytes - offset) {
      return {region, offset};
    }
  }
  return {};
}

void SharedRegions::forget_peers() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& region : regions_) {
    region->forget_peers();
  }
}

void SharedRegions::abandon() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto* list : {&regions_, &leaving_}) {
    for (const auto& region : *list) {
      region->abandoned.store(true);
    }
  }
}

}  // namespace dpcore
