// See flat_memory.h.
#include "reducer/bucket/flat_memory.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "comm/base/fnv.h"
#include "reducer/plan/bucket_plan.h"
#include "tensors/tensor_memory.h"

namespace dpcore {
namespace {

bool have_one_kind(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.device() == other.device();
}

std::byte* begin_of(const Bucket& bucket) {
  return static_cast<std::byte*>(bucket.travelling().mutable_data_ptr());
}

bool are_side_by_side(std::span<const Bucket> buckets) {
  for (size_t i = 1; i < buckets.size(); ++i) {
    if (begin_of(buckets[i]) != begin_of(buckets[i - 1]) + buckets[i - 1].travelling().nbytes()) {
      return false;
    }
  }
  return true;
}

int64_t elements_of(std::span<const Bucket> buckets) {
  int64_t elements = 0;
  for (const Bucket& bucket : buckets) {
    elements += bucket.travelling().numel();
  }
  return elements;
}

// Calls copy(part of the whole, what travels of a bucket) for each bucket.
template <class Copy>
void for_each_part(std::span<Bucket> buckets, const at::Tensor& whole, Copy copy) {
  const at::NoGradGuard no_grad;
  int64_t begin = 0;
  for (const Bucket& bucket : buckets) {
    const int64_t length = bucket.travelling().numel();
    copy(whole.narrow(0, begin, length), bucket.travelling());
    begin += length;
  }
}

}  // namespace

std::vector<at::Tensor> allocate_flats(const std::vector<size_t>& sizes,
                                       const std::vector<at::Tensor>& like, bool side_by_side,
                                       BucketCommunicator& communicator) {
  std::vector<at::Tensor> flats;
  for (size_t first = 0, end = 0; first < sizes.size(); first = end) {
    size_t elements = 0;
    do {
      elements += sizes[end++];
    } while (side_by_side && end < sizes.size() && have_one_kind(like[end], like[first]));
    const at::Tensor whole =
        communicator.allocate(elements, like[first].scalar_type(), like[first].device());
    if (end == first + 1) {
      flats.push_back(whole);
      continue;
    }
    size_t begin = 0;
    for (size_t i = first; i < end; begin += sizes[i++]) {
      flats.push_back(part_of(whole, begin, {static_cast<int64_t>(sizes[i])}, {1}));
    }
  }
  return flats;
}

const at::Tensor& join(std::span<Bucket> buckets, BucketCommunicator& communicator) {
  Bucket& first = buckets.front();
  const int64_t elements = elements_of(buckets);
  const bool is_copy = !are_side_by_side(buckets);
  const bool fits = first.joined.defined() && first.joined.numel() == elements &&
                    have_one_kind(first.joined, first.travelling()) &&
                    first.joined_is_copy == is_copy &&
                    (is_copy || first.joined.const_data_ptr() == begin_of(first));
  first.joined_is_copy = is_copy;
  if (is_copy) {
    if (!fits) {
      first.joined =
          communicator.allocate(static_cast<size_t>(elements), first.travelling().scalar_type(),
                                first.travelling().device());
    }
    for_each_part(buckets, first.joined,
                  [](at::Tensor whole, const at::Tensor& own) { whole.copy_(own); });
  } else if (!fits) {
    // Each part keeps the memory of the whole.
    auto keeps = std::make_shared<at::Tensor>(first.travelling());
    first.joined = tensor_over(std::shared_ptr<std::byte>(keeps, begin_of(first)), {elements},
                               first.travelling().scalar_type(), first.travelling().device());
  }
  return first.joined;
}

void take_apart(std::span<Bucket> buckets) {
  if (buckets.front().joined_is_copy) {
    for_each_part(buckets, buckets.front().joined,
                  [](const at::Tensor& whole, const at::Tensor& own) { own.copy_(whole); });
  }
}

uint64_t joined_layout(std::span<const Bucket> buckets) {
  Fnv layout;
  for (const Bucket& bucket : buckets) {
    layout.add(bucket.layout);
  }
  return layout.value();
}

// ---- lent ------------------------------------------------------------------------------------

std::vector<at::Tensor> lend_flats(const std::vector<size_t>& sizes,
                                   const std::vector<at::Tensor>& like,
                                   const std::vector<size_t>& order, size_t at_a_time,
                                   BucketCommunicator& communicator) {
  struct Lent {
    size_t elements = 0;
    at::Tensor flat;
  };
  std::map<std::pair<at::ScalarType, size_t>, Lent> all;
  const auto lent_to = [&](size_t at) -> Lent& {
    return all[{like[order[at]].scalar_type(), at % at_a_time}];
  };
  for (size_t at = 0; at < order.size(); ++at) {
    lent_to(at).elements = std::max(lent_to(at).elements, sizes[order[at]]);
  }
  std::vector<at::Tensor> flats(sizes.size());
  for (size_t at = 0; at < order.size(); ++at) {
    Lent& lent = lent_to(at);
    if (!lent.flat.defined()) {
      const at::Tensor& one = like[order[at]];
      lent.flat = communicator.allocate(lent.elements, one.scalar_type(), one.device());
    }
    const auto size = static_cast<int64_t>(sizes[order[at]]);
    flats[order[at]] = part_of(lent.flat, 0, {size}, {1});
  }
  return flats;
}

size_t padded_for_parts(size_t elements, size_t element_size, int world) {
  const size_t unit = static_cast<size_t>(world) * (kGradientAlignment / element_size);
  return (elements + unit - 1) / unit * unit;
}

at::Tensor part_of_rank(const Bucket& bucket, int rank, int world) {
  if (bucket.kept.defined()) {
    return bucket.kept;
  }
  const int64_t length = bucket.flat.numel() / world;
  return bucket.flat.narrow(0, rank * length, length);
}

void keep_part(Bucket& bucket, int rank) {
  const at::NoGradGuard no_grad;
  const int64_t length = bucket.kept.numel();
  bucket.kept.copy_(bucket.flat.narrow(0, rank * length, length));
}

}  // namespace dpcore
