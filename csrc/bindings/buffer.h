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

#include "comm/types.h"

namespace dpcore {

struct Buffer {
  std::byte* data = nullptr;
  size_t elements = 0;
  DType dtype = DType::u8;
};

enum class Access { read, write };

// `role` ("input", "output") stands in messages. `place`: the device that the tensor has to be on.
Buffer buffer_of(pybind11::handle object, const char* role, Access access,
                 std::string_view place = "cpu");

// The native handle of the stream that torch's work of this thread goes to; null on the CPU, where
// work is done when it is asked for.
void* current_stream_of(std::string_view place);

// A tensor of memory that torch allocates, contents as they are.
pybind11::object empty_tensor(const std::vector<int64_t>& shape, pybind11::handle torch_dtype,
                              std::string_view place);

// A torch tensor over memory that `owner` keeps.
pybind11::object tensor_over(std::shared_ptr<std::byte> owner, const std::vector<int64_t>& shape,
                             pybind11::handle torch_dtype, std::string_view place = "cpu");
size_t bytes_of_tensor(const std::vector<int64_t>& shape, pybind11::handle torch_dtype);

}  // namespace dpcore
