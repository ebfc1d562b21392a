// Names of types, and tensors over memory that is not torch's.
#include "reducer/tensor_memory.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "comm/error.h"

namespace dpcore {

DType dtype_of(at::ScalarType type, const char* role) {
  switch (type) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kLong:
      return DType::i64;
    case at::kInt:
      return DType::i32;
    case at::kShort:
      return DType::i16;
    case at::kChar:
      return DType::i8;
    case at::kByte:
      return DType::u8;
    case at::kBool:
      return DType::boolean;
    case at::kComplexFloat:
      return DType::c64;
    case at::kComplexDouble:
      return DType::c128;
    default:
      throw Unsupported(std::string(role) + ": dtype " + at::toString(type) +
                        " is not supported; convert it, for example with .float() or view it as "
                        "uint8");
  }
}

namespace {

size_t bytes_needed(const at::Tensor& tensor) {
  auto last = static_cast<size_t>(tensor.storage_offset());
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    last += static_cast<size_t>((tensor.size(axis) - 1) * tensor.stride(axis));
  }
  return (last + 1) * tensor.element_size();
}

// The name of its class in Python, where that is one of its own.
std::string class_of(const at::Tensor& tensor) {
  const pybind11::gil_scoped_acquire gil;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  return pybind11::str(pybind11::type::of(object).attr("__name__"));
}

}  // namespace

bool has_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return false;
  }
  // Not by tensor.data_ptr(): that of some tensors without memory warns or throws.
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (storage._mutable_data_ptr_no_checks().get() == nullptr) {
    return !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.numel() == 0;
  }
  return tensor.numel() == 0 || storage.nbytes() >= bytes_needed(tensor);
}

void refuse_without_memory(const at::Tensor& tensor, const char* role) {
  const c10::DispatchKeySet keys = tensor.key_set();
  std::string what;
  if (tensor.is_meta()) {
    what = "a tensor on the device meta, which has no memory; make it with .to_empty(device=...)";
  } else if (tensor._is_zerotensor()) {
    what =
        "an efficient zero tensor (torch._efficientzerotensor), which has no memory; pass "
        "torch.zeros(...)";
  } else if (keys.has(c10::DispatchKey::Functionalize)) {
    what =
        "a functional tensor, which has no memory of its own; call collectives outside of "
        "functionalization (torch.func.functionalize, torch.compile)";
  } else if (keys.has(c10::DispatchKey::Python)) {
    what = "a " + class_of(tensor) +
           ", a kind of tensor without memory of its own; pass an ordinary tensor (a DTensor's "
           ".to_local(), or the tensors that it wraps)";
  } else if (tensor.has_storage()) {
    what = "a tensor whose memory was freed: it needs " + std::to_string(bytes_needed(tensor)) +
           " bytes, its storage has " + std::to_string(tensor.storage().nbytes()) +
           "; give it memory again with .untyped_storage().resize_(...) before the call";
  } else {
    what = "a tensor without memory of its own (" + tensor.toString() +
           "); call collectives outside of torch.func's transformations";
  }
  throw Unsupported(std::string(role) + ": this is " + what);
}

void check_layout(const at::Tensor& tensor, const char* role) {
  if (tensor.layout() == at::kStrided) {
    return;
  }
  if (tensor.layout() == at::kJagged) {
    throw Unsupported(std::string(role) +
                      ": nested tensors are not supported; pass their .values()");
  }
  throw Unsupported(
      std::string(role) +
      (tensor.layout() == at::kMkldnn ? ": tensors in MKL-DNN's layout" : ": sparse tensors") +
      " are not supported; use .to_dense()");
}

at::Tensor tensor_over(std::shared_ptr<std::byte> owner, at::IntArrayRef shape, at::ScalarType type,
                       at::Device device) {
  void* data = owner.get();
  return at::from_blob(
      data, shape, [keep = std::move(owner)](void*) mutable { keep.reset(); },
      at::TensorOptions().dtype(type).device(device), device);
}

at::Tensor part_of(const at::Tensor& whole, size_t first_element, at::IntArrayRef shape,
                   at::IntArrayRef strides) {
  auto* base = static_cast<std::byte*>(whole.mutable_data_ptr());
  return at::from_blob(
      base + first_element * whole.element_size(), shape, strides,
      [keep = whole](void*) mutable { keep.reset(); }, whole.options(), whole.device());
}

}  // namespace dpcore
