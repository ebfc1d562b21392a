// The error that both kinds of transport raise when the two sides of a message disagree.
#include "comm/network/message.h"

#include <string>

#include "comm/base/error.h"
#include "comm/base/types.h"

namespace dpcore {

void check_content(int peer, const Message& expected, size_t total, uint64_t content) {
  if (total != expected.total || content != expected.content) {
    const auto kind = [](uint64_t c) {
      return c == 0 ? std::string("bytes") : std::string(name_of(static_cast<DType>(c - 1)));
    };
    throw Mismatch("a message from rank " + std::to_string(peer) + " (tag " +
                   std::to_string(expected.tag.part) + ") has " + std::to_string(total) +
                   " bytes of " + kind(content) + ", but " + std::to_string(expected.total) +
                   " of " + kind(expected.content) +
                   " are expected here; both sides must agree on shape and dtype");
  }
}

}  // namespace dpcore
