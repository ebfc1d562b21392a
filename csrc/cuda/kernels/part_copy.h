// A bucket's gradients to and from its flat memory: the lists that one launch each works off.
//
// Made once per bucket and again when a gradient has moved; holds addresses, owns nothing.
#pragma once

#include <span>
#include <vector>

#include "comm/base/types.h"
#include "cuda/kernels/parts.h"

namespace dpcore {

struct FlatPart {
  void* address = nullptr;
  uint64_t flat_offset = 0;  // bytes
  uint64_t elements = 0;
};

// One list for every kMaxParts tensors, in a vector that keeps its memory from one time to the
// next. Throws Unsupported when the two types differ and one is not a 16- or 32-bit float,
// or when a factor is asked for where nothing is computed.
void fill_part_lists(std::vector<PartList>& lists, std::span<const FlatPart> parts, DType part_type,
                     void* flat, DType flat_type, bool to_flat, double factor = 1.0);
// Whether gradients of the one type can be copied into a bucket of the other.
bool can_copy_parts(DType part_type, DType flat_type);

uint32_t blocks_of(const PartList& list);

// The same on memory of the host.
void copy_on_host(const PartList& list, size_t workers);

}  // namespace dpcore
