// Places in buckets that torch's allocator hands out as memory of new tensors.
//
// While backward runs, a reducer may know which large block becomes which gradient. It then offers
// the gradient's place in its bucket, and the tensor that autograd makes there is a *lease* on the
// place until it is freed. Nothing else writes into the place meanwhile: before the reducer does,
// or lets peers do it, it asks for leases. A lease is *settled* when the reducer has seen that only
// autograd has the tensor, and that it is the gradient of this very place.
//
// Memory: a table of fixed size; a lease keeps the memory of its bucket. Threads: any may free a
// tensor. No lock is taken and nothing is allocated.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace dpcore {

enum class Lease : uint8_t { none, open, settled };

Lease lease_on(const void* place);
void settle_lease(const void* place);
// False when the table has no room. `memory` is what the place is a part of.
bool begin_lease(void* place, const c10::Storage& memory);
// False when there is none.
bool end_lease(void* place);

// Chooses places for the large blocks of a thread.
class PlaceChooser {
 public:
  virtual ~PlaceChooser() = default;
  // A place that the block has a lease on from now on, or null.
  virtual void* choose(size_t bytes) = 0;
  // Whether a block for which it has none comes from the pool.
  virtual bool wants_warm_memory() const = 0;
  // Where that block is.
  virtual void note(size_t bytes, const void* block) = 0;
};
// For blocks that this thread takes from now on.
void choose_places_by(std::shared_ptr<PlaceChooser> chooser);
// That of this thread, or null.
PlaceChooser* place_chooser();

}  // namespace dpcore
