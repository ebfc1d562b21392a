// The table of leases: a place is in one of a few slots that its address leads to.
#include "tensors/place_leases.h"

#include <array>
#include <atomic>
#include <utility>

namespace dpcore {
namespace {

constexpr size_t kSlots = 4096;
constexpr size_t kTried = 16;

struct Slot {
  std::atomic<const void*> place{nullptr};  // null: the slot is free
  std::atomic<bool> is_settled{false};
  c10::Storage memory;
};

// Never destroyed, since tensors may be freed after it would be.
struct LeaseTable {
  std::atomic<size_t> leases{0};
  std::array<Slot, kSlots> slots;
};
LeaseTable& lease_table() {
  static auto* const table = new LeaseTable;
  return *table;
}

template <typename Fits>
Slot* find_slot(const void* place, Fits fits) {
  const size_t hash = reinterpret_cast<uintptr_t>(place) / 64 * 0x9e3779b97f4a7c15U >> 40;
  for (size_t i = 0; i < kTried; ++i) {
    Slot& slot = lease_table().slots[(hash + i) % kSlots];
    if (fits(slot)) {
      return &slot;
    }
  }
  return nullptr;
}

Slot* slot_of(const void* place) {
  if (place == nullptr || lease_table().leases.load(std::memory_order_acquire) == 0) {
    return nullptr;
  }
  return find_slot(place, [place](const Slot& slot) {
    return slot.place.load(std::memory_order_acquire) == place;
  });
}

// Trivially destructible, so it can be asked until the thread has ended.
thread_local bool chooser_is_gone = false;
struct ChooserOfThread {
  std::shared_ptr<PlaceChooser> chooser;
  ~ChooserOfThread() { chooser_is_gone = true; }
};
thread_local ChooserOfThread chooser_of_thread;

}  // namespace

Lease lease_on(const void* place) {
  const Slot* slot = slot_of(place);
  if (slot == nullptr) {
    return Lease::none;
  }
  return slot->is_settled.load(std::memory_order_relaxed) ? Lease::settled : Lease::open;
}

void settle_lease(const void* place) {
  if (Slot* slot = slot_of(place)) {
    slot->is_settled.store(true, std::memory_order_relaxed);
  }
}

bool begin_lease(void* place, const c10::Storage& memory) {
  Slot* slot = find_slot(place, [place](Slot& free) {
    const void* nothing = nullptr;
    return free.place.compare_exchange_strong(nothing, place, std::memory_order_acq_rel);
  });
  if (slot == nullptr) {
    return false;
  }
  slot->is_settled.store(false, std::memory_order_relaxed);
  slot->memory = memory;
  lease_table().leases.fetch_add(1, std::memory_order_release);
  return true;
}

bool end_lease(void* place) {
  Slot* slot = slot_of(place);
  if (slot == nullptr) {
    return false;
  }
  const c10::Storage last = std::exchange(slot->memory, c10::Storage());
  slot->place.store(nullptr, std::memory_order_release);
  lease_table().leases.fetch_sub(1, std::memory_order_release);
  return true;
}

void choose_places_by(std::shared_ptr<PlaceChooser> chooser) {
  if (!chooser_is_gone) {
    chooser_of_thread.chooser = std::move(chooser);
  }
}

PlaceChooser* place_chooser() {
  return chooser_is_gone ? nullptr : chooser_of_thread.chooser.get();
}

}  // namespace dpcore
