// See slices.h.
#include "reducer/launch/slices.h"

#include <algorithm>
#include <string>

#include "comm/base/error.h"

namespace dpcore {

std::vector<Slice> slices_of(const LaunchSchedule& schedule, std::span<const uint64_t> bytes,
                             std::span<const uint64_t> units) {
  std::vector<Slice> slices = schedule.slices(bytes);
  if (slices.empty()) {
    return slices;
  }
  const auto refuse = [&](const std::string& what) {
    throw Unsupported("schedule '" + schedule.name() + "': slices() " + what);
  };
  const auto in_words = [](const Slice& slice) {
    return "bytes " + std::to_string(slice.begin) + " to " + std::to_string(slice.end) +
           " of bucket " + std::to_string(slice.bucket);
  };
  if (schedule.phases().begins_with_half() || schedule.whole_buckets() > 0) {
    refuse("is for phases that begin with all_reduce; in halves, each bucket is scattered whole");
  }
  std::vector<Slice> by_place = slices;
  std::sort(by_place.begin(), by_place.end(), [](const Slice& one, const Slice& other) {
    return one.bucket != other.bucket ? one.bucket < other.bucket : one.begin < other.begin;
  });
  std::vector<uint64_t> ends(bytes.size());
  for (const Slice& slice : by_place) {
    if (slice.bucket >= bytes.size()) {
      refuse("names bucket " + std::to_string(slice.bucket) + "; there are " +
             std::to_string(bytes.size()) + ", numbered from 0");
    }
    const uint64_t size = bytes[slice.bucket];
    const uint64_t unit = units[slice.bucket];
    if (slice.begin >= slice.end || slice.end > size) {
      refuse("has " + in_words(slice) + ", which has " + std::to_string(size));
    }
    if (slice.begin % unit != 0 || slice.end % unit != 0) {
      refuse("cuts a number in two: " + in_words(slice) + ", whose numbers have " +
             std::to_string(unit) + " bytes each; cut at a multiple of 16");
    }
    uint64_t& end = ends[slice.bucket];
    if (slice.begin < end) {
      refuse("has " + in_words(slice) + ", of which another slice has the bytes up to " +
             std::to_string(end));
    }
    if (slice.begin > end) {
      refuse("leaves out bytes " + std::to_string(end) + " to " + std::to_string(slice.begin) +
             " of bucket " + std::to_string(slice.bucket));
    }
    end = slice.end;
  }
  for (size_t b = 0; b < bytes.size(); ++b) {
    if (bytes[b] == 0) {
      slices.push_back({.bucket = b});  // of parameters without numbers
    }
    if (ends[b] < bytes[b]) {
      refuse("leaves out bytes " + std::to_string(ends[b]) + " to " + std::to_string(bytes[b]) +
             " of bucket " + std::to_string(b));
    }
  }
  return slices;
}

}  // namespace dpcore
