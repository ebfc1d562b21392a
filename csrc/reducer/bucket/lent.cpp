// See lent.h.
#include "reducer/bucket/lent.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tensors/tensor_memory.h"

namespace dpcore {

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

void keep_part(Bucket& bucket, int rank) {
  const at::NoGradGuard no_grad;
  const int64_t length = bucket.kept.numel();
  bucket.kept.copy_(bucket.flat.narrow(0, rank * length, length));
}

}  // namespace dpcore
