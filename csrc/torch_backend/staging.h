// The memory that an operation works on, for tensors as they come from torch.
//
// A contiguous CPU tensor is used where it lies. One with gaps, or a lazy conjugate, is copied, and
// what was written is copied back when the operation is complete. Lists of tensors, one per rank,
// become one buffer: their own when they lie one after the other, otherwise one in the arena.
//
// Keeps every tensor and buffer that it hands out memory of. One thread at a time: first the
// caller, then whoever completes the operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace dpcore {

class Staging {
 public:
  explicit Staging(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  const std::byte* read(const at::Tensor& tensor);
  std::byte* write(const at::Tensor& tensor);
  // Read and written in place.
  std::byte* update(const at::Tensor& tensor);
  // The parts of all ranks, one after the other.
  const std::byte* read_joined(const std::vector<at::Tensor>& parts);
  std::byte* write_joined(const std::vector<at::Tensor>& parts);
  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }

  bool has_copies() const { return !copies_.empty(); }
  // Results to where they belong. Lets go of nothing: that is the destructor's.
  void copy_back() const;

 private:
  struct Copy {
    at::Tensor to;
    at::Tensor from;
  };
  at::Tensor buffer(int64_t elements, at::ScalarType type);

  std::shared_ptr<Communicator> communicator_;
  std::vector<at::Tensor> kept_;
  std::vector<Copy> copies_;
};

// Throws Unsupported, naming `operation` and the remedy, for a tensor that is not on the CPU or is
// sparse.
void check_cpu_tensor(const at::Tensor& tensor, const char* operation);

// The tensor of a call that torch makes with a list, for several devices per rank. Checked.
const at::Tensor& only_one(const std::vector<at::Tensor>& tensors, const char* operation);

// How the elements of a type travel where they are only moved: types without arithmetic here
// (float8, uint16, ...) as bytes, several per element.
struct MovedAs {
  DType dtype;
  size_t per_element;
};
MovedAs moved_as(const at::Tensor& tensor);

}  // namespace dpcore
