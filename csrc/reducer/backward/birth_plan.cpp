// See birth_plan.h.
#include "reducer/backward/birth_plan.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "tensors/warm_memory.h"

namespace dpcore {
namespace {

constexpr size_t kMostBlocks = 2048;     // of the sizes of gradients, in a step
constexpr uint32_t kGoodSteps = 32;      // after which mistakes are forgotten
constexpr uint32_t kLongestRest = 1024;  // steps

}  // namespace

BirthPlan::BirthPlan(const std::vector<Gradient>& gradients, PlaceOf place_of)
    : place_of_(std::move(place_of)), ways_(gradients.size(), unknown) {
  for (const Gradient& gradient : gradients) {
    const size_t bytes = gradient.parameter.nbytes();
    if (!gradient.is_sparse && bytes >= WarmPool::kSmallest && size_of(bytes) == nullptr) {
      sizes_.push_back({bytes, 0});
    }
  }
  if (!sizes_.empty()) {
    blocks_.reserve(kMostBlocks);
    plan_.reserve(gradients.size());
  }
}

BirthPlan::Size* BirthPlan::size_of(size_t bytes) {
  const auto found = std::find_if(sizes_.begin(), sizes_.end(),
                                  [bytes](const Size& size) { return size.bytes == bytes; });
  return found == sizes_.end() ? nullptr : &*found;
}

BirthPlan::Planned* BirthPlan::planned_for(size_t gradient) {
  const auto found = std::find_if(plan_.begin(), plan_.end(), [gradient](const Planned& planned) {
    return planned.gradient == gradient;
  });
  return found == plan_.end() ? nullptr : &*found;
}

// ---- steps -----------------------------------------------------------------------------------

void BirthPlan::step_begins(bool is_whole) {
  warm_pool()->end_window_in_time();
  if (mode_ == Mode::rests) {
    mode_ = --rests_ == 0 ? Mode::watches : Mode::rests;
  } else if (mode_ == Mode::watches) {
    if (is_whole && !is_wrong_ && !plan_.empty()) {
      mode_ = Mode::offers;
      warm_pool()->release_kept();  // blocks of gradients, for the most part
    }
  } else if (is_wrong_) {
    good_steps_ = 0;
    ++mistakes_;
    rests_ = mistakes_ < 2 ? 0 : std::min(uint32_t{1} << std::min(mistakes_, 10U), kLongestRest);
    mode_ = rests_ == 0 ? Mode::watches : Mode::rests;
  } else if (++good_steps_ == kGoodSteps) {
    mistakes_ = 0;
  }
  if (mode_ != Mode::offers) {
    plan_.clear();
  }
  for (Size& size : sizes_) {
    size.taken = 0;
  }
  for (Planned& planned : plan_) {
    planned.is_refused = false;
  }
  blocks_.clear();
  is_wrong_ = false;
}

void BirthPlan::backward_begins() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0 || !place_of_) {
    return;
  }
  const auto* partial = torch::autograd::get_current_graph_task_exec_info();
  task_ = task;
  is_plain_ = partial != nullptr && partial->empty();
  if (place_chooser() != this) {
    choose_places_by(shared_from_this());
  }
}

bool BirthPlan::wants_warm_memory() const {
  return place_of_ && task_ >= 0 && torch::autograd::get_current_graph_task_id() == task_;
}

// Asked where warm memory is wanted.
bool BirthPlan::is_counted() const {
  return is_plain_ && paused_ == 0 && mode_ != Mode::rests && !at::GradMode::is_enabled();
}

// ---- blocks ----------------------------------------------------------------------------------

void* BirthPlan::choose(size_t bytes) {
  Size* size = is_counted() ? size_of(bytes) : nullptr;
  if (size == nullptr) {
    return nullptr;
  }
  const uint32_t number = size->taken++;
  if (mode_ != Mode::offers || is_wrong_) {
    return nullptr;
  }
  const auto planned = std::find_if(plan_.begin(), plan_.end(), [&](const Planned& one) {
    return one.bytes == bytes && one.number == number;
  });
  if (planned == plan_.end()) {
    return nullptr;
  }
  const Place place = place_of_(planned->gradient);
  planned->is_refused = place.memory == nullptr || !begin_lease(place.address, *place.memory);
  return planned->is_refused ? nullptr : place.address;
}

void BirthPlan::note(size_t bytes, const void* block) {
  Size* size = mode_ == Mode::watches && is_counted() ? size_of(bytes) : nullptr;
  if (size == nullptr) {
    return;
  }
  if (blocks_.size() == kMostBlocks) {
    is_wrong_ = true;  // too many to tell apart
    return;
  }
  blocks_.push_back({bytes, size->taken - 1, block});
}

void BirthPlan::arrived(size_t i, const Gradient& gradient) {
  if (gradient.bytes < WarmPool::kSmallest) {
    ways_[i] = small;
    return;
  }
  const bool has_layout = gradient.has_layout_of_part();
  const void* address = has_layout ? gradient.parameter.grad().const_data_ptr() : nullptr;
  const bool is_in_place = address == gradient.address;
  if (mode_ == Mode::offers) {
    const Planned* planned = planned_for(i);
    if (planned == nullptr) {
      ways_[i] = is_in_place ? kept : watched;
    } else if (is_in_place) {
      ways_[i] = planned->is_refused ? kept : born;
    } else {
      ways_[i] = planned->is_refused ? held : elsewhere;
      is_wrong_ |= !planned->is_refused;
    }
    return;
  }
  ways_[i] = is_in_place ? kept : watched;
  if (mode_ == Mode::watches && has_layout && !is_in_place) {
    // The last block at this address: the ones before it are freed.
    const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), [&](const Block& block) {
      return block.address == address && block.bytes == gradient.bytes;
    });
    if (found != blocks_.rend()) {
      plan_.push_back({found->bytes, found->number, i});
    }
  }
}

}  // namespace dpcore
