// The layout of buckets, and the one copy that each gradient needs.
#include "reducer/bucket/bucket.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <utility>

#include "comm/base/fnv.h"
#include "comm/reduce/reduce.h"
#include "tensors/tensor_memory.h"

namespace dpcore {
namespace {

// From here on torch's own copy is better when it may use several threads.
constexpr size_t kParallelCopyBytes = size_t{1} << 20;
constexpr size_t kNamesInMessages = 3;

// The strides that autograd gives a gradient, so that it can be copied byte by byte.
std::vector<int64_t> strides_for(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  std::vector<int64_t> strides(parameter.dim());
  int64_t stride = 1;
  for (int64_t axis = parameter.dim() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(parameter.size(axis), 1);
  }
  return strides;
}

void add_layout(Fnv& hash, const Gradient& gradient) {
  hash.add(gradient.name);
  for (const int64_t extent : gradient.parameter.sizes()) {
    hash.add(static_cast<uint64_t>(extent));
  }
  for (const int64_t stride : gradient.part.strides()) {
    hash.add(static_cast<uint64_t>(stride));
  }
}

bool can_copy_bytes(const at::Tensor& from, const Gradient& to) {
  return from.layout() == at::kStrided && from.device().is_cpu() && to.part.device().is_cpu() &&
         from.scalar_type() == to.part.scalar_type() && from.strides() == to.part.strides() &&
         from.sizes() == to.part.sizes() && !from.is_conj() && !from.is_neg() && has_memory(from);
}

// Whether no other tensor has its memory than the one that autograd holds.
bool has_memory_alone(const at::Tensor& grad, const at::Tensor* incoming) {
  size_t accounted_for = tensors_behind(grad);
  if (incoming != nullptr && incoming->defined() && incoming->has_storage() &&
      incoming->storage().is_alias_of(grad.storage())) {
    accounted_for += tensors_behind(*incoming);
  }
  return owners_of(grad.storage()) == accounted_for;
}

// Whether a gradient can be given other memory without a difference that the program could see:
// the tensor is known to autograd alone, or its memory to the tensor alone.
bool can_move(const at::Tensor& grad, const at::Tensor* incoming) {
  if (has_unknown_owners(grad) || may_be_numpys(grad)) {
    return false;
  }
  return !is_known_elsewhere(grad) || has_memory_alone(grad, incoming);
}

// Sparse, or with a graph that ends here.
bool is_of_another_kind(const at::Tensor& grad, const at::Tensor& part) {
  return grad.layout() != at::kStrided || grad.requires_grad() ||
         !grad.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(part.key_set());
}

size_t aligned_elements(const Gradient& gradient) {
  const size_t alignment = kGradientAlignment / gradient.parameter.element_size();
  return (static_cast<size_t>(gradient.parameter.numel()) + alignment - 1) / alignment * alignment;
}

}  // namespace

bool Gradient::is_in_place() const {
  const at::Tensor& grad = parameter.grad();
  return grad.defined() && grad.layout() == at::kStrided && grad.const_data_ptr() == address &&
         grad.strides() == part.strides() && grad.sizes() == part.sizes() &&
         grad.scalar_type() == part.scalar_type();
}

bool Gradient::has_layout_of_part() const {
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined() || grad.layout() != at::kStrided || grad.device() != part.device() ||
      grad.scalar_type() != part.scalar_type() || grad.sizes() != part.sizes() || grad.is_conj() ||
      grad.is_neg() || !has_memory(grad)) {
    return false;
  }
  for (int64_t axis = 0; axis < part.dim(); ++axis) {
    // Of an axis with one element, autograd takes any stride.
    if (part.size(axis) > 1 && grad.stride(axis) != part.stride(axis)) {
      return false;
    }
  }
  return true;
}

at::Device device_of(const std::vector<Gradient>& gradients) {
  return gradients.empty() ? at::Device(at::kCPU) : gradients.front().parameter.device();
}

void warn_of_graph(const at::Tensor& grad) {
  if (grad.requires_grad()) {
    TORCH_WARN_ONCE(
        "backward(create_graph=True) with DataParallel: gradients are averaged as numbers, and "
        "derivatives of them end there. For higher derivatives over ranks, use "
        "torch.autograd.grad, whose results are not averaged, and average them yourself");
  }
}

void Gradient::make_part(const at::Tensor& flat) {
  part = part_of(flat, first_element, parameter.sizes(), strides_for(parameter));
  address = static_cast<std::byte*>(flat.mutable_data_ptr()) + first_element * flat.element_size();
}

void Gradient::collect() {
  at::Tensor& grad = parameter.mutable_grad();
  const at::NoGradGuard no_grad;
  if (!grad.defined()) {
    part.zero_();
    return;
  }
  warn_of_graph(grad);
  const bool parallel = bytes >= kParallelCopyBytes && at::get_num_threads() > 1;
  if (!parallel && can_copy_bytes(grad, *this)) {
    copy_bytes(address, grad.const_data_ptr(), bytes);
  } else {
    if (grad._is_zerotensor()) {
      grad = grad.clone();
    } else if (grad.layout() == at::kStrided) {
      if (!has_memory(grad)) {
        refuse_without_memory(grad, ("the gradient of " + name).c_str());
      }
    }
    part.copy_(grad.is_sparse() ? grad.to_dense() : grad);
  }
}

bool Gradient::is_autograds_alone(const at::Tensor* incoming) const {
  const at::Tensor& grad = parameter.grad();
  return !is_of_another_kind(grad, part) && grad.scalar_type() == part.scalar_type() &&
         !has_unknown_owners(grad) && !may_be_numpys(grad) && has_memory_alone(grad, incoming);
}

bool Gradient::settle(const at::Tensor* incoming, bool may_move) {
  at::Tensor& grad = parameter.mutable_grad();
  if (is_of_another_kind(grad, part)) {
    grad = tensor_like(part);
    return true;
  }
  if (!may_move || grad.scalar_type() != part.scalar_type() || !can_move(grad, incoming)) {
    return false;
  }
  grad.unsafeGetTensorImpl()->shallow_copy_from(part.getIntrusivePtr());
  return true;
}

BucketPlan plan_of(const std::vector<Gradient>& gradients, const std::vector<size_t>& order,
                   std::span<const uint64_t> caps, bool from_end) {
  std::map<std::pair<at::ScalarType, std::string>, uint32_t> kinds;
  std::vector<PlannedGradient> planned(gradients.size());
  std::vector<size_t> dense;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& parameter = gradients[i].parameter;
    const auto kind = std::make_pair(parameter.scalar_type(), parameter.device().str());
    planned[i].kind = kinds.emplace(kind, kinds.size()).first->second;
    planned[i].bytes = static_cast<uint64_t>(parameter.numel()) * parameter.element_size();
  }
  std::copy_if(order.begin(), order.end(), std::back_inserter(dense),
               [&](size_t i) { return !gradients[i].is_sparse; });
  return from_end ? plan_buckets_from_end(planned, dense, caps)
                  : plan_buckets(planned, dense, caps);
}

size_t flat_elements(const std::vector<size_t>& members, const std::vector<Gradient>& gradients) {
  size_t elements = 0;
  for (const size_t i : members) {
    elements += aligned_elements(gradients[i]);
  }
  return elements;
}

Bucket make_bucket(size_t number, std::vector<size_t> members, std::vector<Gradient>& gradients,
                   at::Tensor flat) {
  Bucket bucket;
  bucket.gradients = std::move(members);
  bucket.flat = std::move(flat);
  bucket.first_joined = number;
  Fnv layout;
  size_t begin = 0;
  for (const size_t i : bucket.gradients) {
    Gradient& gradient = gradients[i];
    gradient.bucket = number;
    gradient.first_element = begin;
    gradient.make_part(bucket.flat);
    gradient.bytes = gradient.parameter.nbytes();
    bucket.bytes += gradient.bytes;
    add_layout(layout, gradient);
    begin += aligned_elements(gradient);
  }
  bucket.layout = layout.value();
  return bucket;
}

std::string describe(size_t number, const Bucket& bucket, const std::vector<Gradient>& gradients) {
  char size[32];
  std::snprintf(size, sizeof(size), "%.3g MiB", static_cast<double>(bucket.bytes) / (1 << 20));
  std::string text = "bucket " + std::to_string(number) + " (" +
                     std::to_string(bucket.gradients.size()) + " gradients, " + size + ": ";
  for (size_t i = 0; i < bucket.gradients.size() && i < kNamesInMessages; ++i) {
    text += (i > 0 ? ", " : "") + gradients[bucket.gradients[i]].name;
  }
  return text + (bucket.gradients.size() > kNamesInMessages ? ", ...)" : ")");
}

}  // namespace dpcore
