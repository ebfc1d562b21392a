// Between torch's tensors and memory of the core.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "comm/base/types.h"

namespace dpcore {

// `role` ("input", "bucket") stands in the message when there is no such type.
DType dtype_of(at::ScalarType type, const char* role);
// How elements travel that are only moved: those without arithmetic here (float8, uint16, ...) as
// integers of their size.
DType moved_dtype_of(at::ScalarType type);

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
// saved, resized and replaced without its neighbours. Keeps the memory of `whole`.
at::Tensor part_of(const at::Tensor& whole, size_t first_element, at::IntArrayRef shape,
                   at::IntArrayRef strides);

// Keeps a storage, and while one of these keeps it, torch refuses to resize it: an operation in
// flight knows its address. What could be resized before can be again afterwards. Storages of
// devices, whose memory is given back in the order of a stream, are only kept.
class FixedStorage {
 public:
  explicit FixedStorage(c10::Storage storage);
  ~FixedStorage();
  FixedStorage(FixedStorage&& other) noexcept
      : storage_(std::move(other.storage_)), is_fixed_(std::exchange(other.is_fixed_, false)) {}
  FixedStorage& operator=(FixedStorage&&) = delete;

 private:
  c10::Storage storage_;
  bool is_fixed_ = false;
};

// Another tensor over the same storage, without history.
at::Tensor tensor_like(const at::Tensor& tensor);

// Gives all tensors over the storage of `tensor` a copy of its memory, strides included. What they
// had stays allocated as long as the storage does: a numpy array may point there.
void move_storage_to_copy(const at::Tensor& tensor);

// How many tensors over its memory a tensor accounts for: itself, and the base that it is a view of
// when nothing else holds that.
size_t tensors_behind(const at::Tensor& tensor);

// How many tensors, and storages in Python, keep it. One that Python has made and dropped again,
// which lives on for the next time that it is asked for, is none.
size_t owners_of(const c10::Storage& storage);

// Memory that was given to numpy, or came from there: who holds an array has an address.
bool may_be_numpys(const at::Tensor& tensor);

// Whether anything besides the only owner at hand holds this very tensor, Python included.
bool is_known_elsewhere(const at::Tensor& tensor);
// Whether anything holds it besides that owner and Python: a consumer of DLPack may, and has an
// address.
bool has_unknown_owners(const at::Tensor& tensor);

}  // namespace dpcore
