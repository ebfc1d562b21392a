// Names of types, and tensors over memory that is not torch's.
#include "reducer/tensor_memory.h"

#include <ATen/ops/from_blob.h>

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
