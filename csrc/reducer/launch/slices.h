// The slices into which a schedule cuts buckets, checked: each is launched by itself.
//
// A slice is a range of its bucket's flat memory, which stays the bucket's. The schedule names all
// slices once, from the sizes of the buckets alone, so ranks cut alike, and their layouts would
// differ where they did not. A bucket is an average when all its slices are.
//
// Memory: none but the list. Threads: that of forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reducer/launch/launch_schedule.h"

namespace dpcore {

// In the order of launching; none where the schedule leaves buckets whole. `bytes`: of the flat
// memory of each bucket; `units`: of one element in each. Throws Unsupported where slices overlap,
// leave something out, or cut an element in two.
std::vector<Slice> slices_of(const LaunchSchedule& schedule, std::span<const uint64_t> bytes,
                             std::span<const uint64_t> units);

}  // namespace dpcore
