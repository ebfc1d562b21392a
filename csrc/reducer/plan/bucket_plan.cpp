// One pass over the gradients, with one open bucket per kind.
#include "reducer/plan/bucket_plan.h"

#include <algorithm>
#include <map>

namespace dpcore {
namespace {

struct OpenBucket {
  std::vector<size_t> gradients;
  uint64_t bytes = 0;
  uint64_t cap = 0;
  size_t last = 0;  // position of its last gradient in the order
};

}  // namespace

BucketPlan plan_buckets(std::span<const PlannedGradient> gradients, std::span<const size_t> order,
                        std::span<const uint64_t> caps) {
  std::map<uint32_t, OpenBucket> open;
  std::vector<OpenBucket> finished;
  size_t begun = 0;
  for (size_t position = 0; position < order.size(); ++position) {
    const PlannedGradient& gradient = gradients[order[position]];
    OpenBucket& bucket = open[gradient.kind];
    if (bucket.gradients.empty()) {
      bucket.cap = caps[std::min(begun++, caps.size() - 1)];
    }
    bucket.gradients.push_back(order[position]);
    bucket.bytes += gradient.bytes;
    bucket.last = position;
    if (bucket.bytes >= bucket.cap) {
      finished.push_back(std::move(bucket));
      open.erase(gradient.kind);
    }
  }
  for (auto& [kind, bucket] : open) {
    finished.push_back(std::move(bucket));
  }
  std::sort(finished.begin(), finished.end(),
            [](const OpenBucket& a, const OpenBucket& b) { return a.last < b.last; });
  BucketPlan plan;
  for (OpenBucket& bucket : finished) {
    plan.push_back(std::move(bucket.gradients));
  }
  return plan;
}

BucketPlan plan_buckets_from_end(std::span<const PlannedGradient> gradients,
                                 std::span<const size_t> order, std::span<const uint64_t> caps) {
  std::vector<size_t> position(gradients.size());
  for (size_t at = 0; at < order.size(); ++at) {
    position[order[at]] = at;
  }
  const std::vector<size_t> backwards(order.rbegin(), order.rend());
  BucketPlan plan = plan_buckets(gradients, backwards, caps);
  for (std::vector<size_t>& bucket : plan) {
    std::reverse(bucket.begin(), bucket.end());
  }
  std::sort(plan.begin(), plan.end(),
            [&](const auto& a, const auto& b) { return position[a.back()] < position[b.back()]; });
  return plan;
}

bool is_permutation_of(std::span<const size_t> order, size_t n) {
  std::vector<bool> seen(n);
  for (const size_t i : order) {
    if (i >= n || seen[i]) {
      return false;
    }
    seen[i] = true;
  }
  return order.size() == n;
}

}  // namespace dpcore
