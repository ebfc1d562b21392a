// What travels between two ranks over TCP: frames of a fixed header and a checked length.
//
// Connection 0 of a pair carries the control frames, in order; the others carry data. Whatever
// does not look like a frame ends the connection, before any memory is taken for it.
//
//   post      a rank enters an operation: its fingerprint, a word of the caller's if `content` is
//             kHasWord and, for a small operation, the data itself, as a part of its stage (offset)
//   finished  it no longer accesses its peers' memory for the operation
//   failed    why it gave up
//   left      it will call no further operation; why, where an error ended its program
//   alive     it waits, and is neither stopped nor cut off; for which message, if it is one
//   placement where its program is, in words
//   ballot    which ranks it would go on with, after a failure
//   data      bytes [offset, offset + bytes) of a message of `total` bytes
#pragma once

#include <cstdint>

#include "comm/memory/control.h"

namespace dpcore {

enum class FrameKind : uint8_t { data = 1, post, finished, failed, left, alive, placement, ballot };

inline constexpr uint32_t kFrameMagic = 0x6d'66'70'64;           // "dpfm"
inline constexpr uint32_t kMaxDataBytes = uint32_t{512} << 10;   // of one frame
inline constexpr uint32_t kMaxPostedBytes = uint32_t{64} << 10;  // of a stage, in a post

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::data;
  uint8_t unused[3] = {};
  uint32_t bytes = 0;   // after the header
  uint32_t due_us = 0;  // of data behind an emulated link: due_ns of its message, cut short
  uint64_t group = 0;
  uint64_t operation = 0;
  uint64_t part = 0;
  uint64_t total = 0;
  uint64_t content = 0;
  uint64_t offset = 0;
};
static_assert(sizeof(FrameHeader) == 64);

// The moment nearest to `now` of which a frame bears the last digits.
inline int64_t due_ns_of(const FrameHeader& frame, int64_t now) {
  return now +
         static_cast<int32_t>(frame.due_us - static_cast<uint32_t>(now / 1000)) * int64_t{1000};
}

struct PostBody {
  Fingerprint fingerprint;
  double prescale = 1.0;
  uint64_t bytes = 0;  // of user data
};
inline constexpr uint64_t kHasWord = 1;
inline uint32_t post_body_bytes(const FrameHeader& frame) {
  return sizeof(PostBody) + (frame.content == kHasWord ? sizeof(Word) : 0);
}

struct AliveBody {
  int64_t age_ns = 0;  // of the wait
  uint64_t tag = 0;
  uint64_t bytes = 0;
  int32_t peer = -1;
  uint32_t sends = 0;
};

struct PlacementBody {
  int64_t age_ns = 0;  // how long it is there
  uint64_t operations = 0;
  char text[kPlacementBytes] = {};
};

// Whether a header may be what a rank of this version sent.
inline bool is_plausible(const FrameHeader& frame) {
  if (frame.magic != kFrameMagic) {
    return false;
  }
  switch (frame.kind) {
    case FrameKind::data:
      return frame.bytes > 0 && frame.bytes <= kMaxDataBytes && frame.bytes <= frame.total &&
             frame.offset <= frame.total - frame.bytes;
    case FrameKind::post:
      return frame.bytes >= post_body_bytes(frame) &&
             frame.bytes - post_body_bytes(frame) <= kMaxPostedBytes &&
             frame.offset <= kStageBytes - kMaxPostedBytes;
    case FrameKind::failed:
      return frame.bytes == sizeof(FailureRecord);
    case FrameKind::left:
      return frame.bytes == 0 || frame.bytes == sizeof(FailureRecord);
    case FrameKind::alive:
      return frame.bytes == 0 || frame.bytes == sizeof(AliveBody);
    case FrameKind::placement:
      return frame.bytes == sizeof(PlacementBody);
    case FrameKind::ballot:
      return frame.bytes == sizeof(Ballot);
    case FrameKind::finished:
      return frame.bytes == 0;
  }
  return false;
}

}  // namespace dpcore
