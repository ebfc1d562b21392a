// Copies run without autograd: the memory of a tensor is written, as by any communication library.
#include "torch_backend/staging.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <iterator>
#include <string>

#include "comm/base/error.h"
#include "tensors/tensor_memory.h"

namespace dpcore {
namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

std::byte* memory_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode as_it_was_made(to.is_inference());
  to.copy_(from);
}

// Before anything is sent: copying a result back would fail.
void check_own_places(const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw Unsupported(
        "a tensor that is to take a result has several elements at the same place in memory, as "
        "expand() makes them; pass a clone()");
  }
}

bool lie_in_a_row(const std::vector<at::Tensor>& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool follows =
        i == 0 || memory_of(parts[i]) == memory_of(parts[i - 1]) + parts[i - 1].nbytes();
    if (!is_plain(parts[i]) || !follows) {
      return false;
    }
  }
  return true;
}

int64_t elements_of(const std::vector<at::Tensor>& parts) {
  int64_t elements = 0;
  for (const at::Tensor& part : parts) {
    elements += part.numel();
  }
  return elements;
}

}  // namespace

void check_tensor(const at::Tensor& tensor, const char* operation) {
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    throw Unsupported(std::string(operation) + ": a tensor is on " + tensor.device().str() +
                      ", the backend dpcore works on tensors of the CPU and of NVIDIA GPUs; move "
                      "it with .cpu(), or name a backend for that device");
  }
  if (tensor.layout() != at::kStrided) {
    throw Unsupported(std::string(operation) +
                      ": sparse tensors are supported by all_reduce only; use .to_dense()");
  }
  check_memory(tensor, operation);
}

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto* first = static_cast<const std::byte*>(one.const_data_ptr());
  const auto* second = static_cast<const std::byte*>(other.const_data_ptr());
  return first < second + other.nbytes() && second < first + one.nbytes();
}

std::vector<at::Tensor> clones_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> clones;
  for (const at::Tensor& tensor : tensors) {
    clones.push_back(tensor.clone());
  }
  return clones;
}

const at::Tensor& only_one(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (tensors.size() != 1) {
    throw Unsupported(std::string(operation) + " got a list of " + std::to_string(tensors.size()) +
                      " tensors; it takes one. Several devices per rank are not supported");
  }
  check_tensor(tensors.front(), operation);
  return tensors.front();
}

at::Device device_of(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
}

at::Tensor Staging::buffer(int64_t elements, at::ScalarType type) {
  if (!communicator_) {
    kept_.push_back(at::empty({elements}, at::TensorOptions().dtype(type).device(device_)));
    return kept_.back();
  }
  const size_t bytes = static_cast<size_t>(elements) * c10::elementSize(type);
  kept_.push_back(tensor_over(communicator_->allocate(bytes), {elements}, type));
  return kept_.back();
}

const std::byte* Staging::read(const at::Tensor& tensor) {
  keep(tensor);
  if (is_plain(tensor)) {
    return static_cast<const std::byte*>(tensor.const_data_ptr());
  }
  const at::Tensor whole = buffer(tensor.numel(), tensor.scalar_type());
  copy_values(whole.view(tensor.sizes()), tensor);
  return memory_of(whole);
}

std::byte* Staging::write(const at::Tensor& tensor) {
  keep(tensor);
  if (is_plain(tensor)) {
    return memory_of(tensor);
  }
  check_own_places(tensor);
  const at::Tensor whole = buffer(tensor.numel(), tensor.scalar_type());
  copies_.push_back({tensor, whole.view(tensor.sizes())});
  return memory_of(whole);
}

std::byte* Staging::update(const at::Tensor& tensor) {
  std::byte* memory = write(tensor);
  if (!is_plain(tensor)) {
    copy_values(copies_.back().from, tensor);
  }
  return memory;
}

template <class ForEach>
std::byte* Staging::joined(const std::vector<at::Tensor>& parts, ForEach each) {
  for (const at::Tensor& part : parts) {
    keep(part);
  }
  if (lie_in_a_row(parts)) {
    return memory_of(parts.front());
  }
  const at::Tensor whole = buffer(elements_of(parts), parts.front().scalar_type());
  int64_t begin = 0;
  for (const at::Tensor& part : parts) {
    each(part, whole.narrow(0, begin, part.numel()).view(part.sizes()));
    begin += part.numel();
  }
  return memory_of(whole);
}

const std::byte* Staging::read_joined(const std::vector<at::Tensor>& parts) {
  return joined(parts,
                [](const at::Tensor& part, const at::Tensor& room) { copy_values(room, part); });
}

std::byte* Staging::write_joined(const std::vector<at::Tensor>& parts) {
  return joined(parts, [this](const at::Tensor& part, const at::Tensor& room) {
    check_own_places(part);
    copies_.push_back({part, room});
  });
}

void Staging::take(Staging&& other) {
  kept_.insert(kept_.end(), other.kept_.begin(), other.kept_.end());
  std::move(other.memory_.begin(), other.memory_.end(), std::back_inserter(memory_));
  copies_.insert(copies_.end(), other.copies_.begin(), other.copies_.end());
  other.kept_.clear();
  other.memory_.clear();
  other.copies_.clear();
}

void Staging::copy_back() const {
  for (const Copy& one : copies_) {
    copy_values(one.to, one.from);
  }
}

}  // namespace dpcore
