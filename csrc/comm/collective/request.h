// What a caller asks for: one collective with its buffers and options, and parts of different
// sizes, one per rank. Values; the buffers stay the caller's until the operation is over.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "comm/base/types.h"
#include "comm/base/word.h"
#include "comm/collective/path.h"
#include "comm/memory/control.h"
#include "comm/schedule/program.h"

namespace dpcore {

struct Request {
  Collective collective = Collective::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  // Elements: of the whole buffer for all_reduce, broadcast and reduce; of one rank's part for
  // the others, unless the parts differ.
  size_t count = 0;
  std::vector<uint64_t> input_parts;   // uneven: elements per rank
  std::vector<uint64_t> output_parts;  // (the same list but for all_to_all)
  double prescale = 1.0;
  uint64_t layout = 0;
  std::shared_ptr<Words> words;            // or none, alike on all ranks
  std::shared_ptr<const Program> program;  // run this list of moves instead of a fused path
  uint64_t algorithm = 0;                  // for the fingerprint: hash of name or moves
  bool finds_not_finite = false;           // among inputs of a sum, while it adds
  bool ordered = false;                    // "auto" takes only algorithms that add in rank order
  Path force = Path::automatic;
  int priority = 0;
  double timeout_s = 0;  // 0: the communicator's
};

// What of it all ranks must agree on.
inline Fingerprint fingerprint_of(const Request& request) {
  return {static_cast<uint8_t>(request.collective),
          static_cast<uint8_t>(request.dtype),
          static_cast<uint8_t>(request.op),
          static_cast<uint8_t>(request.force),
          request.root,
          request.count,
          request.layout,
          request.algorithm};
}
// Lets the request run the list of moves, if the algorithm is one. Throws Unsupported where that is
// for another call.
inline void use_algorithm(Request& request, const CallAlgorithm& algorithm, int world) {
  if (algorithm.program) {
    check_fits(algorithm.program->schedule, request.collective, request.root, world);
    request.program = algorithm.program;
  }
}
// Throws Unsupported when its operator has no meaning for its elements.
inline void check_operator(const Request& request) {
  if (!is_valid(request.op, request.dtype)) {
    throw Unsupported(std::string(name_of(request.op)) + " has no meaning for " +
                      std::string(name_of(request.dtype)));
  }
}
// Throws Unsupported when a rank can't send to `peer` or receive from it.
inline void check_peer(int peer, int rank, int world) {
  if (peer < 0 || peer >= world || peer == rank) {
    throw Unsupported("rank " + std::to_string(rank) + " can't exchange a message with " +
                      std::to_string(peer) + ": choose another rank of 0.." +
                      std::to_string(world - 1));
  }
}

using Parts = std::vector<uint64_t>;

// At most the largest number: a sum that begins again at 0 might look right.
inline uint64_t sum_of(const Parts& parts) {
  uint64_t sum = 0;
  for (const uint64_t part : parts) {
    if (__builtin_add_overflow(sum, part, &sum)) {
      return ~uint64_t{0};
    }
  }
  return sum;
}

// For the fingerprint: ranks that cut differently must not exchange anything. Never 0.
inline uint64_t layout_of(const Parts& parts) {
  Fnv hash;
  for (const uint64_t part : parts) {
    hash.add(part);
  }
  return hash.value() | 1;
}

// Parts that are the same list on all ranks: of everything but all_to_all. Throws Unsupported where
// bytes could not be counted.
inline void set_parts(Request& request, const Parts& parts) {
  request.input_parts = parts;
  request.output_parts = parts;
  request.count = *std::max_element(parts.begin(), parts.end());
  if (request.count > ~uint64_t{0} / size_of(request.dtype) / parts.size()) {
    throw Unsupported("a part of " + std::to_string(request.count) + " elements");
  }
  request.layout ^= layout_of(parts);
}

// An exchange, in which each rank knows its own sizes only: what they agree on is that there are
// any.
inline void set_exchanged_parts(Request& request, const Parts& inputs, const Parts& outputs) {
  request.input_parts = inputs;
  request.output_parts = outputs;
  request.layout ^= 1;
}

// The bytes of all parts together: in an exchange, of those that this rank gives or of those that
// it takes, whichever are more.
inline size_t bytes_of_parts(const Request& request) {
  return std::max(sum_of(request.input_parts), sum_of(request.output_parts)) *
         size_of(request.dtype);
}

}  // namespace dpcore
