// The arena of a device communicator: memory of the devices that all ranks have mapped, a region
// for each call of add(), which all ranks make in the same order and with as many bytes.
//
// So a place in a region means the same on all ranks: where this rank's tensor lies says where
// everybody's does, and nobody has to ask. The way to the memory is chosen once (memory_choice.h).
//
// Memory: a region belongs to its rank. It goes when nobody uses it here and no rank has it mapped:
// what all ranks have dropped is found out at the next add(), the rest at the end. In a
// communicator that failed a peer may still write to it, so then it never goes. Threads: add() by
// one at a time; find() by any. Dropping is an atomic flag.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "cuda/device.h"

namespace dpcore {

struct SharedRegion {
  SharedRegion(std::shared_ptr<Device> device, uint64_t id, size_t bytes);
  ~SharedRegion();  // gives back the own memory, unless it is abandoned
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;
  void forget_peers();

  std::shared_ptr<Device> device;
  uint64_t id;
  size_t bytes;
  std::byte* own = nullptr;
  std::vector<std::byte*> at;                // by rank, as this device sees it; the own one too
  mutable std::atomic<bool> dropped{false};  // by who uses it here
  std::atomic<bool> abandoned{false};
};

class SharedRegions {
 public:
  struct Place {  // of a tensor
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
  Place find(const void* memory, size_t bytes) const;

  MemoryKind kind() const { return kind_; }
  // No work of this rank uses memory of others any more.
  void forget_peers();
  // Peers may still write: nothing is given back from here on.
  void abandon();

 private:
  struct Card;
  void gather(const void* own, size_t bytes, void* all);
  Card offer(SharedRegion& region, std::string& problem);
  void map_peers(SharedRegion& region, std::vector<Card>& cards, int exported);
  static void check(const std::vector<Card>& cards, const std::vector<uint8_t>& who_failed,
                    const std::string& problem);
  void let_go_of_dropped(const std::vector<Card>& cards);

  std::shared_ptr<Communicator> control_;
  std::shared_ptr<Device> device_;
  Engine::Interrupt interrupt_;
  double timeout_s_;
  MemoryKind kind_ = MemoryKind::address;
  uint64_t next_id_ = 0;
  std::mutex adding_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<SharedRegion>> regions_;
  std::vector<std::shared_ptr<SharedRegion>> leaving_;  // forgotten here, perhaps not by all
};

}  // namespace dpcore
