// The arena of a device communicator: memory of the devices that all ranks have mapped, a region
// for each call of add(), which all ranks make in the same order and with as many bytes.
//
// So an offset in a region means the same on all ranks: where this rank's tensor lies says where
// every other rank's does, without a message. The way to the memory is chosen once
// (memory_choice.h).
//
// Memory: a region belongs to its rank and to all that have it mapped: behind a descriptor it lives
// until the last of them has let go, and ranks of one process count how many hold it. So a rank may
// leave at any time, and a peer that comes late writes to memory that is still there. Of ipc the
// owner has to stay: there a region goes when all ranks have left, or never (abandon). What all
// ranks have dropped is found out at the next add(), the rest at the end. Threads: add() by one at
// a time; find() by any. Dropping is an atomic flag.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "cuda/device/device.h"

namespace dpcore {

struct SharedRegion {
  SharedRegion(std::shared_ptr<Device> device, uint64_t id, size_t bytes);
  ~SharedRegion();  // lets go of all of it, unless it is abandoned
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;
  // With the device current; no work of this rank uses memory of others any more.
  void forget_peers();

  std::shared_ptr<Device> device;
  uint64_t id;
  size_t bytes;
  std::byte* own = nullptr;
  std::shared_ptr<std::byte> memory;             // the own one
  std::vector<std::byte*> at;                    // by rank, as this device sees it; own too
  std::vector<std::shared_ptr<std::byte>> held;  // of other ranks of this process
  mutable std::atomic<bool> is_programs{
      false};  // a tensor lies in it: it is not known which kernels use it
  mutable std::atomic<bool> dropped{false};  // by the code that uses it here
  std::atomic<bool> settled{false};          // the device has been waited for since
  std::atomic<bool> abandoned{false};
};

class SharedRegions {
 public:
  struct Address {  // of a tensor, on every rank
    std::shared_ptr<const SharedRegion> region;
    size_t offset = 0;
    std::byte* on(int r) const { return region->at[static_cast<size_t>(r)] + offset; }
    explicit operator bool() const { return region != nullptr; }
  };

  // All ranks of `control` come here: they choose the way. Throws Unsupported where there is none.
  SharedRegions(std::shared_ptr<Communicator> control, std::shared_ptr<Device> device,
                Engine::Interrupt interrupt, double timeout_s);

  // All ranks: memory that stays until the result is dropped. Throws the same kind of error on all
  // ranks where one of them can't have it.
  std::shared_ptr<const SharedRegion> add(size_t bytes);
  // The same as memory of a tensor, which may outlive the communicator.
  static std::shared_ptr<std::byte> memory_of(std::shared_ptr<const SharedRegion> region);
  Address find(const void* memory, size_t bytes) const;

  MemoryKind kind() const { return kind_; }
  // With the device current; no work of this rank uses memory of others any more.
  void forget_peers();
  // Nothing is given back from here on: work of this rank may still use it, or, of ipc, a peer.
  void abandon();

 private:
  struct RankInfo;
  void share(SharedRegion& region);
  RankInfo offer(SharedRegion& region, std::string& problem);
  void map_peers(SharedRegion& region, std::vector<RankInfo>& infos, int exported);
  static void check(const std::vector<RankInfo>& infos, const std::vector<uint8_t>& who_failed,
                    const std::string& problem);
  void let_go_of_dropped(const std::vector<RankInfo>& infos);

  std::shared_ptr<Communicator> control_;
  std::shared_ptr<Device> device_;
  Engine::Interrupt interrupt_;
  double timeout_s_;
  MemoryKind kind_ = MemoryKind::address;
  uint64_t next_id_ = 0;
  std::mutex adding_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<SharedRegion>> regions_;
  std::vector<std::shared_ptr<SharedRegion>> leaving_;  // of ipc: forgotten here, not yet by all
};

}  // namespace dpcore
