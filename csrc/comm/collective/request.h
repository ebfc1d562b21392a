// What a caller asks for: one collective with its buffers and options. A value; the buffers stay
// the caller's until the operation is over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/base/types.h"
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
  std::shared_ptr<const Program> program;  // run this list of moves instead of a fused path
  uint64_t algorithm = 0;                  // for the fingerprint: hash of name or moves
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
// Throws Unsupported when its operator has no meaning for its elements.
void check_operator(const Request& request);
// Throws Unsupported when a rank can't send to `peer` or receive from it.
void check_peer(int peer, int rank, int world);

}  // namespace dpcore
