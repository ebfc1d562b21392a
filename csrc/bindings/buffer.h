// A Python object as memory that a collective can read or write.
//
// Takes torch tensors and, on the CPU, anything with the buffer protocol (numpy arrays,
// bytearrays). What cannot be taken as it is raises with the reason and the remedy; nothing is
// converted or copied behind the caller's back.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "comm/base/types.h"

namespace dpcore {

struct HoldDeleter {
  void (*call)(void*) = nullptr;
  void operator()(void* what) const { call(what); }
};
// Keeps memory where it is, whatever its owner does with the object meanwhile: the export of a
// buffer (a bytearray can't be resized), or the storage of a tensor. Let go of with the GIL.
using Hold = std::unique_ptr<void, HoldDeleter>;

struct Buffer {
  std::byte* data = nullptr;
  size_t elements = 0;
  DType dtype = DType::u8;
  Hold hold;
  pybind11::handle object;  // that it was made of; borrowed
};

// From here on torch does not resize the storage that is held, if it is one.
Hold with_fixed_size(Hold hold);

// What an asynchronous operation keeps of a buffer until it is complete.
struct HeldBuffer {
  explicit HeldBuffer(Buffer&& buffer)
      : object(pybind11::reinterpret_borrow<pybind11::object>(buffer.object)),
        hold(with_fixed_size(std::move(buffer.hold))) {}
  pybind11::object object;
  Hold hold;
};

// Of the buffers that are there.
template <class... Buffers>
std::vector<HeldBuffer> held(Buffers&&... buffers) {
  std::vector<HeldBuffer> result;
  result.reserve(sizeof...(buffers));
  ((buffers.object ? void(result.emplace_back(std::move(buffers))) : void()), ...);
  return result;
}

enum class Access { read, write };
// What happens to the elements: types without arithmetic can be moved as integers of their size.
enum class Elements { moved, reduced };

// `role` ("input", "output") stands in messages. `device_name`: where the tensor has to be.
Buffer buffer_of(pybind11::handle object, const char* role, Access access, Elements elements,
                 std::string_view device_name = "cpu");

// The native handle of the stream that torch's work of this thread goes to; null on the CPU, where
// work is done when it is asked for.
void* current_stream_of(std::string_view device_name);

// A tensor of memory that torch allocates, contents as they are.
pybind11::object empty_tensor(const std::vector<int64_t>& shape, pybind11::handle torch_dtype,
                              std::string_view device_name);

// A torch tensor over memory that `owner` keeps.
pybind11::object tensor_over(std::shared_ptr<std::byte> owner, const std::vector<int64_t>& shape,
                             pybind11::handle torch_dtype, std::string_view device_name = "cpu");
size_t bytes_of_tensor(const std::vector<int64_t>& shape, pybind11::handle torch_dtype);

}  // namespace dpcore
