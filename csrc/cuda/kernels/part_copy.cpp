// See part_copy.h.
#include "cuda/kernels/part_copy.h"

#include <string>

#include "comm/base/error.h"

namespace dpcore {
namespace {

// Tensors of more elements than a list can count are cut into several parts.
constexpr uint64_t kMostElements = uint64_t{1} << 31;

Cast cast_of(DType type) {
  switch (type) {
    case DType::f32:
      return Cast::f32;
    case DType::f16:
      return Cast::f16;
    case DType::bf16:
      return Cast::bf16;
    default:
      return Cast::none;
  }
}

}  // namespace

bool can_copy_parts(DType part_type, DType flat_type) {
  return part_type == flat_type ||
         (cast_of(part_type) != Cast::none && cast_of(flat_type) != Cast::none);
}

void fill_part_lists(std::vector<PartList>& lists, std::span<const FlatPart> parts, DType part_type,
                     void* flat, DType flat_type, bool to_flat, double factor) {
  const bool computes = part_type != flat_type || factor != 1.0;
  if (computes && (cast_of(part_type) == Cast::none || cast_of(flat_type) == Cast::none)) {
    throw Unsupported("gradients of " + std::string(name_of(part_type)) + " in a bucket of " +
                      std::string(name_of(flat_type)) + " (times " + std::to_string(factor) +
                      "): only float32, float16 and bfloat16 are cast or scaled on the way; use "
                      "buckets of the gradients' own type");
  }
  lists.clear();
  const auto add = [&](char* address, uint64_t flat_offset, uint32_t elements) {
    if (lists.empty() || lists.back().count == kMaxParts) {
      PartList& list = lists.emplace_back();
      list.flat = static_cast<char*>(flat);
      list.part_type = computes ? cast_of(part_type) : Cast::none;
      list.flat_type = computes ? cast_of(flat_type) : Cast::none;
      list.bytes = static_cast<uint8_t>(size_of(part_type));
      list.to_flat = to_flat;
      list.factor = static_cast<float>(factor);
    }
    PartList& list = lists.back();
    const int i = list.count++;
    list.parts[i] = address;
    list.flat_bytes[i] = flat_offset;
    list.elements[i] = elements;
    const auto blocks = static_cast<uint32_t>((elements + kBlockElements - 1) / kBlockElements);
    list.first_block[i + 1] = list.first_block[i] + blocks;
  };
  for (const FlatPart& part : parts) {
    for (uint64_t at = 0; at < part.elements; at += kMostElements) {
      add(static_cast<char*>(part.address) + at * size_of(part_type),
          part.flat_offset + at * size_of(flat_type),
          static_cast<uint32_t>(std::min(part.elements - at, kMostElements)));
    }
  }
}

uint32_t blocks_of(const PartList& list) { return list.first_block[list.count]; }

void copy_on_host(const PartList& list, size_t workers) {
  for (uint32_t block = 0; block < blocks_of(list); ++block) {
    for (size_t worker = 0; worker < workers; ++worker) {
      element::copy_block(list, block, worker, workers);
    }
  }
}

}  // namespace dpcore
