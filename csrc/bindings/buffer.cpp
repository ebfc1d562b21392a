// The one file of the communicator's bindings that knows torch.
#include "bindings/buffer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "comm/base/error.h"
#include "tensors/tensor_memory.h"

namespace py = pybind11;

namespace dpcore {
namespace {

constexpr std::string_view kCpu = "cpu";

std::string shape_text(const at::Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

void check_device(const at::Tensor& tensor, const char* role, std::string_view device_name) {
  if (device_name == kCpu ? tensor.device().is_cpu() : tensor.device().str() == device_name) {
    return;
  }
  throw Unsupported(std::string(role) + ": the tensor is on " + tensor.device().str() +
                    ", this communicator works on " +
                    (device_name == kCpu ? "the CPU; move it with .cpu()"
                                         : std::string(device_name) + "; move it with .to('" +
                                               std::string(device_name) + "')"));
}

c10::Storage storage_of(void* what) {
  return c10::Storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(what)));
}

void let_go_of_storage(void* what) { storage_of(what); }

Hold hold_of(const at::Tensor& tensor) {
  c10::Storage storage = tensor.storage();
  return {storage.unsafeReleaseStorageImpl(), {let_go_of_storage}};
}

// Quantized elements mean nothing without their scale, which would stay behind.
DType dtype_in(at::ScalarType type, const char* role, Elements elements) {
  return elements == Elements::reduced || at::isQIntType(type) ? dtype_of(type, role)
                                                               : moved_dtype_of(type);
}

Buffer buffer_of_tensor(const at::Tensor& tensor, const char* role, Elements elements,
                        std::string_view device_name) {
  check_device(tensor, role, device_name);
  check_layout(tensor, role);
  check_memory(tensor, role);
  if (tensor.is_conj() || tensor.is_neg()) {
    throw Unsupported(
        std::string(role) + ": the tensor is a lazy " +
        (tensor.is_conj() ? "conjugate; pass .resolve_conj()" : "negative; pass .resolve_neg()") +
        " and copy the result back");
  }
  if (!tensor.is_contiguous()) {
    throw Unsupported(std::string(role) + ": the tensor of shape " + shape_text(tensor) +
                      " is not contiguous (strided); pass .contiguous() and copy the result back");
  }
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()),
          static_cast<size_t>(tensor.numel()),
          dtype_in(tensor.scalar_type(), role, elements),
          hold_of(tensor),
          {}};
}

// As its owner calls it, where that has a name for it.
std::string name_of_elements(py::handle object, const std::string& format) {
  return py::hasattr(object, "dtype") ? std::string(py::str(object.attr("dtype")))
                                      : "format '" + format + "'";
}

DType dtype_of_format(py::handle object, const std::string& format, size_t item, const char* role,
                      Elements elements) {
  const char* code = format.c_str();
  if ((*code == '>' || *code == '!') && item > 1) {
    throw Unsupported(std::string(role) + ": arrays of " + name_of_elements(object, format) +
                      " are not supported: their bytes are swapped (big-endian). Pass "
                      "array.astype(array.dtype.newbyteorder('='))");
  }
  if (*code == '@' || *code == '=' || *code == '<') {
    ++code;
  }
  const std::string_view kind(code);
  if (kind == "e" && item == 2) {
    return DType::f16;
  }
  if (kind == "f" || kind == "d") {
    return item == 4 ? DType::f32 : DType::f64;
  }
  if (kind == "Zf" || kind == "Zd") {
    return item == 8 ? DType::c64 : DType::c128;
  }
  if (kind == "?") {
    return DType::boolean;
  }
  if (kind == "B" || kind == "c") {
    return DType::u8;
  }
  const bool is_unsigned = kind == "H" || kind == "I" || kind == "L" || kind == "Q";
  if (is_unsigned && elements == Elements::reduced) {
    throw Unsupported(std::string(role) + ": arrays of " + name_of_elements(object, format) +
                      " can be moved (broadcast, all_gather, send, ...), but there is no "
                      "arithmetic for them; pass " +
                      (item < 8 ? "array.astype('int64')"
                                : "array.view('int64'), which is right for a sum, and for all "
                                  "else below 2**63"));
  }
  if (is_unsigned || kind == "b" || kind == "h" || kind == "i" || kind == "l" || kind == "q") {
    return item == 1 ? DType::i8 : item == 2 ? DType::i16 : item == 4 ? DType::i32 : DType::i64;
  }
  const bool is_text = !kind.empty() && (kind.back() == 'w' || kind.back() == 's');
  throw Unsupported(std::string(role) + ": arrays of " +
                    (is_text ? "text" : name_of_elements(object, format)) + " are not supported" +
                    (kind == "O" ? ": they hold Python objects" : ""));
}

Hold export_of(py::handle object, const char* role, Access access) {
  auto view = std::make_unique<Py_buffer>();
  const int flags =
      PyBUF_FORMAT | PyBUF_ND | PyBUF_STRIDES | (access == Access::write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), view.get(), flags) != 0) {
    PyErr_Clear();
    std::string problem = std::string(role) + ": the " + Py_TYPE(object.ptr())->tp_name;
    if (PyObject_GetBuffer(object.ptr(), view.get(), PyBUF_FULL_RO) == 0) {
      PyBuffer_Release(view.get());
      throw Unsupported(problem + " can't be written to; pass a writable array");
    }
    const std::string reason = py::str(py::error_already_set().value());
    problem += " can't be read as a buffer (" + reason + ")";
    const bool is_array = py::hasattr(object, "dtype") && py::hasattr(object, "astype");
    throw Unsupported(problem +
                      (is_array ? "; pass numbers, such as array.view('int64') of times" : ""));
  }
  return {view.release(), {[](void* what) {
            const std::unique_ptr<Py_buffer> held(static_cast<Py_buffer*>(what));
            PyBuffer_Release(held.get());
          }}};
}

// Ranks exchange elements in the order of their indices, so memory in any other order would meet
// the elements of other indices on a rank whose array is laid out differently.
void check_order(const Py_buffer& view, const char* role) {
  if (PyBuffer_IsContiguous(&view, 'C') != 0) {
    return;
  }
  if (PyBuffer_IsContiguous(&view, 'F') != 0) {
    throw Unsupported(std::string(role) +
                      ": the array lies in memory column by column (Fortran order); pass "
                      "numpy.ascontiguousarray(...), or its transpose (array.T, the same memory) "
                      "on every rank");
  }
  throw Unsupported(std::string(role) +
                    ": the array has gaps in memory (strided), or its axes are permuted; pass "
                    "numpy.ascontiguousarray(...)");
}

Buffer buffer_of_array(py::handle object, const char* role, Access access, Elements elements) {
  Hold hold = export_of(object, role, access);
  const auto& view = *static_cast<const Py_buffer*>(hold.get());
  check_order(view, role);
  const auto item = static_cast<size_t>(view.itemsize);
  Buffer buffer;
  buffer.data = static_cast<std::byte*>(view.buf);
  buffer.elements = item > 0 ? static_cast<size_t>(view.len) / item : 0;
  buffer.dtype =
      dtype_of_format(object, view.format != nullptr ? view.format : "B", item, role, elements);
  buffer.hold = std::move(hold);
  return buffer;
}

at::ScalarType scalar_type_of(py::handle torch_dtype) {
  if (!THPDtype_Check(torch_dtype.ptr())) {
    throw py::type_error("dtype must be a torch.dtype");
  }
  return reinterpret_cast<THPDtype*>(torch_dtype.ptr())->scalar_type;
}

// Kinds of tensors that act when they are used, as torch would tell them: a gradient in flight is
// waited for here (dpcore/ddp/wrapper/in_flight.py).
void announce_use(py::handle tensor) {
  if (!THPVariable_CheckExact(tensor.ptr()) && has_memory(THPVariable_Unpack(tensor.ptr()))) {
    tensor.attr("data_ptr")();
  }
}

}  // namespace

Hold with_fixed_size(Hold hold) {
  if (!hold || hold.get_deleter().call != let_go_of_storage) {
    return hold;
  }
  return {new FixedStorage(storage_of(hold.release())),
          {[](void* what) { delete static_cast<FixedStorage*>(what); }}};
}

Buffer buffer_of(py::handle object, const char* role, Access access, Elements elements,
                 std::string_view device_name) {
  if (THPVariable_Check(object.ptr())) {
    announce_use(object);
    Buffer buffer = buffer_of_tensor(THPVariable_Unpack(object.ptr()), role, elements, device_name);
    buffer.object = object;
    return buffer;
  }
  if (device_name == kCpu && PyObject_CheckBuffer(object.ptr())) {
    Buffer buffer = buffer_of_array(object, role, access, elements);
    buffer.object = object;
    return buffer;
  }
  throw py::type_error(
      std::string(role) + ": expected a torch tensor" +
      (device_name == kCpu ? " or a numpy array" : " on " + std::string(device_name)) + ", not " +
      Py_TYPE(object.ptr())->tp_name);
}

void* current_stream_of(std::string_view device_name) {
  if (device_name == kCpu) {
    return nullptr;
  }
  const at::Device device{std::string(device_name)};
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

py::object empty_tensor(const std::vector<int64_t>& shape, py::handle torch_dtype,
                        std::string_view device_name) {
  bytes_of_tensor(shape, torch_dtype);  // checks both
  const auto options =
      at::TensorOptions().dtype(scalar_type_of(torch_dtype)).device(std::string(device_name));
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(at::empty(shape, options)));
}

size_t bytes_of_tensor(const std::vector<int64_t>& shape, py::handle torch_dtype) {
  const at::ScalarType type = scalar_type_of(torch_dtype);
  dtype_in(type, "dtype", Elements::moved);
  size_t bytes = at::elementSize(type);
  for (const int64_t extent : shape) {
    if (extent < 0) {
      throw py::value_error("a shape can't have a negative extent");
    }
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(extent), &bytes)) {
      throw py::value_error("a tensor of this shape is larger than any memory");
    }
  }
  return bytes;
}

py::object tensor_over(std::shared_ptr<std::byte> owner, const std::vector<int64_t>& shape,
                       py::handle torch_dtype, std::string_view device_name) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor_over(
      std::move(owner), shape, scalar_type_of(torch_dtype), at::Device(std::string(device_name)))));
}

}  // namespace dpcore
