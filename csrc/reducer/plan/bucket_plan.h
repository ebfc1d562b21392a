// Puts gradients into buckets: a pure function, with a twin in dpcore/reference/buckets.py.
//
// Gradients are taken in the order in which they are expected to arrive. Those of one kind (dtype
// and device) fill a bucket, which closes once it holds as many bytes as its cap, as in torch DDP.
// Buckets are numbered in the order of their last gradients, the order in which they become ready:
// launched by number, no bucket waits for one that is ready later.
//
// A gradient is never split. It arrives as a whole, so its halves would be ready at the same time,
// and an urgent operation of the core can overtake another every 256 KiB anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dpcore {

// Gradients begin at multiples of this within a bucket, so that each can be copied and reduced
// by whole vectors.
inline constexpr size_t kGradientAlignment = 64;

struct PlannedGradient {
  uint64_t bytes = 0;
  uint32_t kind = 0;  // equal numbers may share a bucket
};

using BucketPlan = std::vector<std::vector<size_t>>;  // bucket -> its gradients, in their order

// `order`: gradients as they are expected, each at most once; those left out get no bucket.
// `caps`: bytes of the first bucket that is begun, of the second, ...; the last one is for all
// further. A cap of 0 gives every gradient a bucket of its own.
BucketPlan plan_buckets(std::span<const PlannedGradient> gradients, std::span<const size_t> order,
                        std::span<const uint64_t> caps);
// The same, but filled from the end of the order: as torch DDP cuts by a cap that it was given,
// until it knows in which order gradients come.
BucketPlan plan_buckets_from_end(std::span<const PlannedGradient> gradients,
                                 std::span<const size_t> order, std::span<const uint64_t> caps);

// Whether it names every number from 0 to n - 1 once.
bool is_permutation_of(std::span<const size_t> order, size_t n);

}  // namespace dpcore
