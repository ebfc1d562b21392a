// Copies gradients into buckets and results back, and decides which memory a gradient has.
//
// On a device nothing is copied as gradients arrive: when a bucket has its last gradient, one
// launch copies all of them, with a cast if the bucket is sent in a narrower type. Fresh tensors of
// autograd are released right after the launch: freed memory is reused in the order of the stream
// that reads it. Gradients whose layout differs from their parameter's (sparse, other strides) are
// copied one by one, as on the host.
//
// In a narrower type, `parameter.grad` is replaced only when the bucket is sent: until then
// autograd may add to it, and its part of the bucket has no values of this backward.
//
// A gradient's memory is the bucket's, its own if it was kept, or the program's. Before a part of a
// bucket is filled again, tensors that still hold the last gradient, or a view of it, keep its
// values: their shared storage gets a copy, and the part a new storage. A numpy array has an
// address but no storage; for it, the bucket moves to new memory. In plain steps no gradient is
// held, and the cost is a check of a reference count. A gradient in the program's memory stays
// there, and results are copied to it.
//
// A gradient may be born in its part (backward/birth_plan.h): then it is moved onto the part's
// storage and nothing is copied. Its own storage had a lease on the place; if another tensor has
// one, the bucket moves to new memory as well.
//
// Threads: that of forward and backward. After the first iteration nothing is allocated here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reducer/bucket/bucket.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

class GradientCopier {
 public:
  // `grad_is_part`: false: results are copied back to a `parameter.grad` of its own. The lists are
  // the reducer's.
  GradientCopier(std::vector<Gradient>& gradients, std::vector<Bucket>& buckets,
                 std::shared_ptr<BucketCommunicator> communicator, bool grad_is_part)
      : gradients_(gradients),
        buckets_(buckets),
        communicator_(std::move(communicator)),
        grad_is_part_(grad_is_part) {}

  // Buckets of wider types travel as this one; none: as they are.
  void travel_as(std::optional<at::ScalarType> narrow);
  // Of a new bucket: how it travels, and whether its gradients are copied together.
  void prepare(Bucket& bucket);
  // Whether `parameter.grad` may become a bucket's memory: not that of one reducer while another
  // one of the same parameters reads it.
  void set_may_move(bool may_move) { may_move_ = may_move; }
  // A tensor that autograd holds at the moment, or none.
  void set_incoming(const at::Tensor* incoming) { incoming_ = incoming; }

  // A gradient that has come; copied together with the others of its bucket where that is better.
  void bring(Gradient& gradient);
  // Adds to `parameter.grad` what autograd will deliver later, and not add again.
  void bring_computed(Gradient& gradient, const at::Tensor& value);
  // Autograd has added to a gradient that had come before.
  void bring_again(size_t i);
  // Whether backward may make this gradient in its part, which nothing has then.
  bool may_be_born(const Gradient& gradient) const;
  // Before the bucket is sent: tensors that have leases on places in it keep the memory.
  void leave_to_leases(Bucket& bucket);
  // All gradients of the bucket are there.
  void complete(Bucket& bucket) {
    if (bucket.together && !bucket.narrow.defined() && !bucket.kept.defined()) {
      gather(bucket, bucket.gradients);
    }
  }
  // Whatever is still missing of what is about to be sent.
  void fill(Bucket& bucket);
  // The results of a bucket that is complete to where `parameter.grad` is. Averages are multiplied
  // by the scale.
  void set_scale(double scale) { scale_ = scale; }
  void hand_out(Bucket& bucket, bool are_averages);

  // The part is about to be filled anew.
  void leave_part_to_holders(Gradient& gradient);
  // `parameter.grad` has been copied into its part.
  void settle(Gradient& gradient);

  // Since the beginning.
  struct Counts {
    uint64_t launches = 0;  // of copies of many at once
    uint64_t together = 0;  // gradients in these
    uint64_t alone = 0;     // gradients that cost a copy, or a cast, each
    uint64_t born = 0;      // gradients that backward has made in their parts
    uint64_t moved = 0;     // buckets that were left to other holders of their memory
  };
  const Counts& counts() const { return counts_; }

 private:
  void come_to_this_stream(Bucket& bucket);
  void gather(Bucket& bucket, std::span<const size_t> members);
  void keep_until_read(const Bucket& bucket, const at::Tensor& grad);
  void fill_narrow(Bucket& bucket);
  void fill_lent(Bucket& bucket);
  void hand_out_to_own(Bucket& bucket);
  void hand_out_narrow(Bucket& bucket, double factor);
  void copy_together(const Bucket& bucket, const at::Tensor& flat, bool to_flat, double factor);
  void leave_bucket_to_holders(Bucket& bucket);
  bool adopt(Gradient& gradient);

  std::vector<Gradient>& gradients_;
  std::vector<Bucket>& buckets_;
  std::shared_ptr<BucketCommunicator> communicator_;
  bool grad_is_part_;
  bool may_move_ = true;
  double scale_ = 1;
  std::optional<at::ScalarType> narrow_type_;
  const at::Tensor* incoming_ = nullptr;
  std::vector<FlatGradient> copied_;  // of one launch, and their owners
  std::vector<size_t> copied_of_;
  Counts counts_;
};

}  // namespace dpcore
