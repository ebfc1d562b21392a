// The memory that an operation works on, for tensors as they come from torch.
//
// A contiguous tensor is used in place. One with gaps, or a lazy conjugate, is copied, and outputs
// are copied back when the operation is complete. Lists of tensors, one per rank, become one
// buffer: their own memory if they lie one after the other, otherwise one in the arena, or of
// torch's allocator for tensors on a device. There copies are work in the current stream.
//
// Keeps every tensor and buffer whose memory it hands out. One thread at a time: first the caller,
// then the thread that completes the operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "tensors/tensor_memory.h"

namespace dpcore {

class Staging {
 public:
  // Of tensors on the CPU: buffers lie in the arena of the communicator.
  explicit Staging(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}
  explicit Staging(at::Device device) : device_(device) {}

  const std::byte* read(const at::Tensor& tensor);
  std::byte* write(const at::Tensor& tensor);
  std::byte* of_message(const at::Tensor& tensor, bool sends) {
    return sends ? const_cast<std::byte*>(read(tensor)) : write(tensor);
  }
  // Read and written in place.
  std::byte* update(const at::Tensor& tensor);
  // The parts of all ranks, one after the other.
  const std::byte* read_joined(const std::vector<at::Tensor>& parts);
  std::byte* write_joined(const std::vector<at::Tensor>& parts);
  // Its memory too, which `tensor.data = other` would let go of.
  void keep(const at::Tensor& tensor) {
    kept_.push_back(tensor);
    memory_.emplace_back(tensor.storage());
  }
  // What another one keeps and copies, from here on too.
  void take(Staging&& other);
  const std::vector<at::Tensor>& kept() const { return kept_; }

  bool has_copies() const { return !copies_.empty(); }
  // Results to where they belong. Lets go of nothing: that is the destructor's.
  void copy_back() const;

 private:
  struct Copy {
    at::Tensor to;
    at::Tensor from;
  };
  at::Tensor buffer(int64_t elements, at::ScalarType type);
  // One buffer, with `each` called for every part and its place in it.
  template <class ForEach>
  std::byte* joined(const std::vector<at::Tensor>& parts, ForEach each);

  std::shared_ptr<Communicator> communicator_;
  at::Device device_{at::kCPU};
  std::vector<at::Tensor> kept_;
  std::vector<FixedStorage> memory_;  // of those
  std::vector<Copy> copies_;
};

// Throws Unsupported, naming `operation` and the remedy, for a tensor that is neither on the CPU
// nor on a GPU, or is sparse.
void check_tensor(const at::Tensor& tensor, const char* operation);

// Whether two contiguous tensors share memory.
bool overlap(const at::Tensor& one, const at::Tensor& other);

std::vector<at::Tensor> clones_of(const std::vector<at::Tensor>& tensors);

// The tensor of a call that torch makes with a list, for several devices per rank. Checked.
const at::Tensor& only_one(const std::vector<at::Tensor>& tensors, const char* operation);

// Of the first; the CPU for an empty list.
at::Device device_of(const std::vector<at::Tensor>& tensors);

}  // namespace dpcore
