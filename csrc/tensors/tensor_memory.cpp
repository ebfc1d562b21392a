// Names of types, and tensors over memory that is not torch's.
#include "tensors/tensor_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "comm/base/error.h"

namespace dpcore {
namespace {

// torch 2.13 counts the Python object as a reference; before, one that only C++ holds is not.
template <typename Slot>
bool has_python_object(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj() != nullptr;
  } else {
    return slot.check_pyobj().value_or(nullptr) != nullptr;
  }
}

// Only Python's object for it keeps it for Python, and that is kept by us.
template <typename Slot>
bool is_kept_by_us_alone(const Slot& slot) {
  if constexpr (requires { slot.has_unique_reference(); }) {
    return slot.has_unique_reference();
  } else {
    return false;
  }
}

// What to pass where there is arithmetic to be done.
std::string converted(at::ScalarType type) {
  switch (type) {
    case at::kUInt16:
      return ".to(torch.int32)";
    case at::kUInt32:
      return ".to(torch.int64)";
    case at::kUInt64:
      return ".view(torch.int64), which is right for a sum, and for all else below 2**63";
    case at::kComplexHalf:
      return ".to(torch.complex64)";
    default:
      return at::isQIntType(type) ? ".dequantize()" : ".float()";
  }
}

// The type of the core that has the same arithmetic.
std::optional<DType> same_type(at::ScalarType type) {
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
      return std::nullopt;
  }
}

}  // namespace

DType dtype_of(at::ScalarType type, const char* role) {
  if (const auto same = same_type(type)) {
    return *same;
  }
  throw Unsupported(std::string(role) + ": dtype " + at::toString(type) +
                    " can be moved (broadcast, all_gather, send, ...), but there is no "
                    "arithmetic for it; pass " +
                    converted(type));
}

DType moved_dtype_of(at::ScalarType type) {
  if (const auto same = same_type(type)) {
    return *same;
  }
  switch (at::elementSize(type)) {
    case 1:
      return DType::u8;
    case 2:
      return DType::i16;
    case 4:
      return DType::i32;
    default:
      return DType::i64;
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
  at::DataPtr memory(
      base + first_element * whole.element_size(), new at::Tensor(whole),
      [](void* keep) { delete static_cast<at::Tensor*>(keep); }, whole.device());
  const size_t bytes = at::detail::computeStorageNbytes(shape, strides, whole.element_size());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                       c10::GetAllocator(whole.device().type()), /*resizable=*/true);
  at::Tensor part =
      at::detail::make_tensor<at::TensorImpl>(std::move(storage), whole.key_set(), whole.dtype());
  part.unsafeGetTensorImpl()->set_sizes_and_strides(shape, strides);
  return part;
}

namespace {

struct Fixed {  // how often, by storage; never destroyed, since works may go after it would
  std::mutex mutex;
  std::unordered_map<c10::StorageImpl*, size_t> counts;
};
Fixed& fixed() {
  static auto* const all = new Fixed;
  return *all;
}

}  // namespace

FixedStorage::FixedStorage(c10::Storage storage) : storage_(std::move(storage)) {
  c10::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  if (!impl->device().is_cpu()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(fixed().mutex);
  const auto found = fixed().counts.find(impl);
  if (found != fixed().counts.end()) {
    ++found->second;
    is_fixed_ = true;
  } else if (impl->resizable()) {
    impl->set_resizable(false);
    fixed().counts.emplace(impl, 1);
    is_fixed_ = true;
  }
}

FixedStorage::~FixedStorage() {
  if (!is_fixed_) {
    return;
  }
  c10::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  const std::lock_guard<std::mutex> lock(fixed().mutex);
  const auto found = fixed().counts.find(impl);
  if (--found->second == 0) {
    impl->set_resizable(true);
    fixed().counts.erase(found);
  }
}

at::Tensor tensor_like(const at::Tensor& tensor) {
  return at::Tensor::wrap_tensor_impl(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
}

void move_storage_to_copy(const at::Tensor& tensor) {
  struct Memories {
    at::DataPtr now;
    at::DataPtr before;
  };
  const at::Tensor copy = tensor.clone();
  auto memories = std::make_unique<Memories>();
  memories->now = copy.storage().unsafeGetStorageImpl()->set_data_ptr({});
  void* data = memories->now.get();
  Memories* both = memories.get();
  at::DataPtr together(
      data, memories.release(), [](void* kept) { delete static_cast<Memories*>(kept); },
      tensor.device());
  both->before = tensor.storage().unsafeGetStorageImpl()->set_data_ptr(std::move(together));
}

size_t tensors_behind(const at::Tensor& tensor) {
  if (!tensor.is_view()) {
    return 1;
  }
  const at::TensorBase& base = tensor._base();
  const bool has_idle_object =
      base.use_count() == 2 && is_kept_by_us_alone(*base.unsafeGetTensorImpl()->pyobj_slot());
  return base.use_count() == 1 || has_idle_object ? 2 : 1;
}

size_t owners_of(const c10::Storage& storage) {
  const size_t owners = storage.use_count();
  const bool has_idle_object =
      owners > 1 && is_kept_by_us_alone(*storage.unsafeGetStorageImpl()->pyobj_slot());
  return has_idle_object ? owners - 1 : owners;
}

bool may_be_numpys(const at::Tensor& tensor) {
  return !tensor.storage().unsafeGetStorageImpl()->resizable();
}

bool has_unknown_owners(const at::Tensor& tensor) {
  const bool is_pythons = has_python_object(*tensor.unsafeGetTensorImpl()->pyobj_slot());
  return tensor.use_count() > (is_pythons ? 2 : 1);
}

bool is_known_elsewhere(const at::Tensor& tensor) {
  return tensor.use_count() > 1 || has_python_object(*tensor.unsafeGetTensorImpl()->pyobj_slot());
}

}  // namespace dpcore
