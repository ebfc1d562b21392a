// A Python object as memory that a collective can read or write.
//
// Takes CPU torch tensors and anything with the buffer protocol (numpy arrays, bytearrays).
// What cannot be taken as it is raises with the reason and the remedy; nothing is converted or
// copied behind the caller's back.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/types.h"

namespace dpcore {

struct Buffer {
  std::byte* data = nullptr;
  size_t elements = 0;
  DType dtype = DType::u8;
};

enum class Access { read, write };

// `role` ("input", "output") stands in messages.
Buffer buffer_of(pybind11::handle object, const char* role, Access access);

// A torch tensor over memory that `owner` keeps.
pybind11::object tensor_over(std::shared_ptr<std::byte> owner, const std::vector<int64_t>& shape,
                             pybind11::handle torch_dtype);
size_t bytes_of_tensor(const std::vector<int64_t>& shape, pybind11::handle torch_dtype);

}  // namespace dpcore
