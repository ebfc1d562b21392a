// Which large block of a backward becomes which gradient: so that it can be born in its bucket.
//
// The large blocks that a backward takes repeat from step to step. In a step that is watched, the
// plan notes the first, second, ... block of each size that is the size of a gradient, and finds
// the one that a gradient arrives in. In the next steps it offers the gradient's place in its
// bucket to that block: autograd takes a fresh gradient as it is, and nothing is copied.
//
// A plan may be wrong, since a program may do something else in every step. Then a place has gone
// to another tensor, which has a lease on it (tensors/place_leases.h), or a gradient arrives
// elsewhere and is copied. Both cost time only. The plan offers nothing more in that step and
// watches again; if that happens often, it rests for ever more steps in between.
//
// Only the outermost run of autograd that passes through the outputs of the wrapped model counts,
// and only where it leaves gradients without a graph in all parameters: torch.autograd.grad,
// create_graph=True and backward(inputs=...) get warm memory, but no places.
//
// Threads: that of backward. Memory: lists made with the reducer. It outlives the reducer where a
// thread still has it as its chooser, and offers nothing then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "reducer/bucket/bucket.h"
#include "tensors/place_leases.h"

namespace dpcore {

class BirthPlan final : public PlaceChooser, public std::enable_shared_from_this<BirthPlan> {
 public:
  // How a gradient came into its bucket last.
  enum Way : uint8_t {
    unknown,    // not yet
    born,       // in its place
    kept,       // it was there before, and backward has added to it
    small,      // copied, like all below: smaller than blocks of the pool
    watched,    // the plan does not know its block
    held,       // something else has the place, or wants the gradient elsewhere
    elsewhere,  // the plan was wrong
    announced,  // it left a compiled graph early
    kWays
  };

  struct Place {
    const c10::Storage* memory = nullptr;  // what it is a part of; null: not to be offered now
    void* address = nullptr;
  };
  using PlaceOf = std::function<Place(size_t gradient)>;
  BirthPlan(const std::vector<Gradient>& gradients, PlaceOf place_of);

  // The reducer is gone.
  void close() { place_of_ = nullptr; }

  // A run of autograd passes through an output, on this thread.
  void backward_begins();
  // `is_whole`: all gradients of the step before have arrived.
  void step_begins(bool is_whole);
  // A gradient has arrived, and nothing has been moved yet.
  void arrived(size_t i, const Gradient& gradient);
  // It was in its place, and something else has its memory as well.
  void left(size_t i) {
    ways_[i] = held;
    is_wrong_ = true;  // to move a bucket in every step would cost more than copies
  }
  // It was there because we have just copied it, not because backward had added to it.
  void was_announced(size_t i) {
    if (ways_[i] == kept) {
      ways_[i] = announced;
    }
  }
  // What the reducer takes for itself is none of backward's.
  class Pause {
   public:
    explicit Pause(BirthPlan* plan) : plan_(plan) {
      if (plan_ != nullptr) {
        ++plan_->paused_;
      }
    }
    ~Pause() {
      if (plan_ != nullptr) {
        --plan_->paused_;
      }
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    BirthPlan* plan_;
  };

  Way way_of(size_t i) const { return ways_[i]; }

  bool wants_warm_memory() const override;
  void* choose(size_t bytes) override;
  void note(size_t bytes, const void* block) override;

 private:
  struct Size {
    size_t bytes = 0;
    uint32_t taken = 0;  // blocks in this step
  };
  struct Block {
    size_t bytes = 0;
    uint32_t number = 0;  // among those of its size
    const void* address = nullptr;
  };
  struct Planned {
    size_t bytes = 0;
    uint32_t number = 0;
    size_t gradient = 0;
    bool is_refused = false;  // in this step, by place_of
  };
  enum class Mode : uint8_t { watches, offers, rests };

  bool is_counted() const;
  Size* size_of(size_t bytes);
  Planned* planned_for(size_t gradient);

  PlaceOf place_of_;
  std::vector<Size> sizes_;
  std::vector<Block> blocks_;  // of a step that is watched
  std::vector<Planned> plan_;
  std::vector<Way> ways_;
  Mode mode_ = Mode::watches;
  bool is_wrong_ = false;  // in this step
  int task_ = -1;          // the run of autograd that passes through an output
  bool is_plain_ = false;  // and counts
  int paused_ = 0;
  uint32_t mistakes_ = 0;
  uint32_t good_steps_ = 0;  // since the last mistake
  uint32_t rests_ = 0;       // steps to come
};

}  // namespace dpcore
