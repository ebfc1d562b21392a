// Between torch's tensors and memory of the core.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

#include "comm/types.h"

namespace dpcore {

// `role` ("input", "bucket") stands in the message when there is no such type.
DType dtype_of(at::ScalarType type, const char* role);

// Whether its elements lie in memory: those of a wrapper around other tensors, a FakeTensor, an
// efficient zero tensor, or a tensor whose storage was freed do not.
bool has_memory(const at::Tensor& tensor);
// Throws Unsupported, which says what the tensor is and what to pass instead, where it has none.
void refuse_without_memory(const at::Tensor& tensor, const char* role);
inline void check_memory(const at::Tensor& tensor, const char* role) {
  if (!has_memory(tensor)) [[unlikely]] {
    refuse_without_memory(tensor, role);
  }
}
// Throws Unsupported for a layout that is not strided.
void check_layout(const at::Tensor& tensor, const char* role);

// A tensor over memory that `owner` keeps.
at::Tensor tensor_over(std::shared_ptr<std::byte> owner, at::IntArrayRef shape, at::ScalarType type,
                       at::Device device = at::kCPU);

// A tensor over a part of `whole`, as a tensor of its own and not as a view: it may be detached,
// saved and replaced without its neighbours. Keeps the memory of `whole`.
at::Tensor part_of(const at::Tensor& whole, size_t first_element, at::IntArrayRef shape,
                   at::IntArrayRef strides);

}  // namespace dpcore
