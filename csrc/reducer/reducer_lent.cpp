// Gradients that stay where autograd has put them until their bucket is sent, because the bucket
// has no memory before (bucket/lent.h). From then on `parameter.grad` is where the gradient was
// copied to, which is the next bucket's memory soon: nobody may read it, and the optimizer gets
// `Bucket::kept`.
//
// Who waits for whom: the launch of a bucket waits for the one that had its memory before, which
// every rank has launched before, so ranks that launch in one order never wait in a circle. The
// wait has the deadline and the errors of every wait for a bucket.
#include <ATen/core/grad_mode.h>

#include "reducer/reducer.h"
#include "tensors/tensor_memory.h"

namespace dpcore {

// Before the bucket at this place of the order of launching is filled.
void Reducer::make_room(size_t at) {
  if (whole_buckets_ == 0 || at < whole_buckets_) {
    return;
  }
  const size_t before = order_[at - whole_buckets_];
  if (buckets_[before].state == Bucket::launched) {
    wait(before);
  }
}

void Reducer::fill_lent(Bucket& bucket) {
  if (!bucket.kept.defined()) {
    return;
  }
  const at::NoGradGuard no_grad;
  for (const size_t i : bucket.gradients) {
    Gradient& gradient = gradients_[i];
    gradient.collect();
    ++copies_.alone;
    if (at::Tensor& grad = gradient.parameter.mutable_grad(); grad.defined()) {
      grad = tensor_like(gradient.part);
    }
  }
}

}  // namespace dpcore
