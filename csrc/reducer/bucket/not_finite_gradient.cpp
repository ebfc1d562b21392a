// From an element of what travelled to a gradient.
#include "reducer/bucket/not_finite_gradient.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

#include "tensors/tensor_memory.h"

namespace dpcore {

void FirstNotFinite::note(const NotFinite& found, std::span<const Bucket> together,
                          const std::vector<Gradient>& gradients, uint64_t step, Part part) {
  uint64_t element = found.element;
  size_t at = 0;
  for (; at + 1 < together.size(); ++at) {
    const auto length = static_cast<uint64_t>(together[at].travelling().numel());
    if (element < length) {
      break;
    }
    element -= length;
  }
  const Bucket& bucket = together[at];
  size_t number = bucket.gradients.front();
  for (const size_t i : bucket.gradients) {
    number = gradients[i].first_element <= element ? i : number;
  }
  const bool is_in_this_step = first_ && last_step_ == step;
  const bool was_not_zeroed = first_ && last_step_ + 1 == step && first_->gradient == number;
  last_step_ = step;
  if (is_in_this_step || was_not_zeroed) {
    return;
  }
  const at::Tensor& travelled = bucket.travelling();
  const auto length = static_cast<uint64_t>(travelled.numel() / part.count);
  const uint64_t part_begin = static_cast<uint64_t>(part.number) * length;
  const uint64_t gradient_begin = gradients[number].first_element;
  const auto elements = static_cast<uint64_t>(gradients[number].parameter.numel());
  const bool is_here = element >= part_begin && element < part_begin + length;
  const uint64_t begin = std::max(gradient_begin, part_begin);
  const uint64_t end = is_here ? std::min(gradient_begin + elements, part_begin + length) : begin;
  const auto* data = static_cast<const std::byte*>(travelled.const_data_ptr());
  std::string narrowed_to;
  if (bucket.narrow.defined()) {
    narrowed_to = c10::getDtypeNames(travelled.scalar_type()).first;
  }
  first_ = {.gradient = number,
            .rank = found.rank,
            .ranks = found.ranks,
            .element = element - gradient_begin,
            .counts = count_not_finite(dtype_of(travelled.scalar_type(), "bucket"),
                                       data + begin * travelled.element_size(), end - begin),
            .elements = end - begin,
            .step = step,
            .narrowed_to = narrowed_to};
}

}  // namespace dpcore
