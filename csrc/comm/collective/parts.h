// Parts of different sizes, one per rank, as requests carry them. Values only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "comm/base/fnv.h"
#include "comm/collective/request.h"

namespace dpcore {

using Parts = std::vector<uint64_t>;

inline uint64_t sum_of(const Parts& parts) {
  return std::accumulate(parts.begin(), parts.end(), uint64_t{0});
}

// For the fingerprint: ranks that cut differently must not exchange anything. Never 0.
inline uint64_t layout_of(const Parts& parts) {
  Fnv hash;
  for (const uint64_t part : parts) {
    hash.add(part);
  }
  return hash.value() | 1;
}

// Parts that are the same list on all ranks: of everything but all_to_all.
inline void set_parts(Request& request, const Parts& parts) {
  request.input_parts = parts;
  request.output_parts = parts;
  request.count = *std::max_element(parts.begin(), parts.end());
  request.layout ^= layout_of(parts);
}

// The bytes of all parts together: in an exchange, of those that this rank gives or of those that
// it takes, whichever are more.
inline size_t bytes_of_parts(const Request& request) {
  return std::max(sum_of(request.input_parts), sum_of(request.output_parts)) *
         size_of(request.dtype);
}

}  // namespace dpcore
