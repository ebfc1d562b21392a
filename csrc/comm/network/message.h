// A message between two ranks, as transports and connections know it.
//
// It has a tag (the operation it belongs to and a part number within it) and a length that both
// sides know beforehand. Values only; a Sink refers to its caller's function and memory, which
// outlive the call.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "comm/base/error.h"
#include "comm/base/types.h"

namespace dpcore {

struct MessageTag {
  uint64_t operation = 0;
  uint64_t part = 0;
  auto operator<=>(const MessageTag&) const = default;
};

// What both sides of a message must agree on.
struct Message {
  MessageTag tag;
  size_t total = 0;          // bytes
  uint64_t content = 0;      // what the bytes are (a dtype), checked where they arrive
  bool keeps_order = false;  // other messages may bear the same tag
  bool from_any = false;     // its receiver takes it from the rank whose bytes come first
  int priority = 0;          // a NIC sends the message with the highest one next
  int64_t due_ns = 0;        // when an emulated link lets its last byte arrive
};

// Takes bytes [offset, offset + bytes) of a message, in place where they came to lie.
// `destination`, where given, is memory for the whole message: a transport may write the bytes
// there itself instead of calling.
class Sink {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, Sink>)
  Sink(F& take, std::byte* destination = nullptr)  // NOLINT: implicit, lives as long as the call
      : destination_(destination),
        context_(&take),
        call_([](void* f, const std::byte* data, size_t offset, size_t bytes) {
          (*static_cast<F*>(f))(data, offset, bytes);
        }) {}
  void operator()(const std::byte* data, size_t offset, size_t bytes) const {
    call_(context_, data, offset, bytes);
  }
  std::byte* destination() const { return destination_; }

 private:
  std::byte* destination_;
  void* context_;
  void (*call_)(void*, const std::byte*, size_t, size_t);
};

// Throws Mismatch, naming both sides, when what came is not what is expected here.
inline void check_content(int peer, const Message& expected, size_t total, uint64_t content) {
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
