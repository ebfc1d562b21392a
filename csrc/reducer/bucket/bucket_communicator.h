// The interface between the reducer and the network: all-reduces of buckets, or their halves, by
// slot.
//
// A slot holds one operation in flight; the reducer uses one per bucket, so that starting
// an operation takes no memory. Memory of buckets belongs to the implementation, because it
// knows where an all-reduce is cheapest (an arena that the peers map, a device).
//
// Threads: all calls come from the thread that runs backward, or from forward, never from two at
// once, and without the GIL. start() must not wait for other ranks; wait() may, with a deadline of
// its own, and throws on failure.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "comm/base/types.h"
#include "comm/base/word.h"
#include "comm/group/trace.h"
#include "comm/reduce/not_finite.h"

namespace dpcore {

struct CallAlgorithm;

struct BucketCall {
  static constexpr int kUrgent = 1 << 30;  // priority of what is small and all that follows needs
  // all_reduce; or, in place, reduce_scatter and all_gather: this rank's part stays where it lies.
  Collective collective = Collective::all_reduce;
  ReduceOp op = ReduceOp::mean;
  int priority = 0;
  uint64_t layout = 0;            // what the bucket holds, to be compared between ranks
  bool background = true;         // false: only wait() needs to drive it
  bool finds_not_finite = false;  // asks for what not_finite() says
  std::optional<size_t> after = std::nullopt;  // the slot whose operation makes what this one sends
  std::shared_ptr<Words> words = nullptr;      // where carries_words()
  const CallAlgorithm* algorithm = nullptr;    // null: the communicator's own
};

// One gradient, and where its part of flat memory begins.
struct FlatGradient {
  void* address = nullptr;
  uint64_t flat_bytes = 0;
  uint64_t elements = 0;
};

// Gradients of one type to flat memory of the same or another one, or back.
struct GradientCopies {
  std::span<const FlatGradient> gradients;
  at::ScalarType type = at::kFloat;
  at::Tensor flat;
  bool to_flat = true;
  double factor = 1;
};

class BucketCommunicator {
 public:
  virtual ~BucketCommunicator() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;
  // Throws the first error again when nothing can succeed any more.
  virtual void check_usable() {}

  // A flat tensor of zeros. It outlives the object while anything holds it.
  virtual at::Tensor allocate(size_t elements, at::ScalarType type, at::Device device) = 0;
  // Whether start() knows reduce_scatter and all_gather.
  virtual bool can_go_in_halves() const { return false; }
  // Whether start() takes words along.
  virtual bool carries_words() const { return false; }
  // Whether one rank may call allocate() without the others.
  virtual bool allocates_alone() const { return true; }
  // Whether tensors of the program may be made in the memory of allocate().
  virtual bool lends_places() const { return false; }

  virtual void reserve(size_t slots) = 0;
  // In place. Ranks start the same operations in the same order. Throws Unsupported where the
  // algorithm is not for this call.
  virtual void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) = 0;
  virtual void wait(size_t slot) = 0;
  // After wait(): when the operation was over. 0 where that is unknown.
  virtual int64_t over_ns(size_t) const { return 0; }
  // Whether sums are looked at while they are made; and after wait(), what was NaN or Inf there: in
  // elements of the bucket, as far as this rank has seen.
  virtual bool finds_not_finite() const { return false; }
  virtual NotFinite not_finite(size_t) const { return {}; }
  // Whether wait() would return, or throw, at once. False where that is unknown.
  virtual bool is_done(size_t) { return false; }
  // Nothing will wait for it any more: keeps the memory until the operation lets go of it.
  virtual void abandon(size_t slot, const at::Tensor& bucket) = 0;

  // Whether gradients of one type, to a bucket of another on that device, are best copied all at
  // once when their bucket is complete, as on a device, where each copy is a launch; otherwise each
  // as it comes, while it is in the cache.
  virtual bool copies_together(at::ScalarType, at::ScalarType, at::Device) const { return false; }
  // In the stream that torch's work of this thread goes to, without waiting for it. What is read
  // must be kept until then; what is freed into the same stream is. Returns the launches it took.
  virtual size_t copy_together(const GradientCopies&) { return 0; }

  // Where its events go while a trace is recorded; may be none.
  virtual TraceRecorder* trace() { return nullptr; }
  // On a device, what the host asks for happens later: a moment, or a span until end_span(), of the
  // stream that torch's work goes to. False, and 0: on the host's clock, by the caller.
  virtual bool add_moment(const TraceEvent&) { return false; }
  virtual uint64_t begin_span(const TraceEvent&) { return 0; }
  virtual void end_span(uint64_t) {}
};

// What may run instead of a bucket's all-reduce: a hook in Python, for example.
//
// The reducer starts a hook when the schedule launches the bucket, and waits for it where it would
// wait for the all-reduce; the result has to be in the bucket then. Memory of its own is the
// hook's; it lives as long as the reducer, and buckets_changed() tells it that buckets have been
// planned anew. When a rank dies: wait() throws, like an all-reduce.
class BucketHook {
 public:
  virtual ~BucketHook() = default;
  virtual void start(size_t slot, const at::Tensor& bucket, const BucketCall& call) = 0;
  virtual void wait(size_t slot, const at::Tensor& bucket) = 0;
  // Nothing will wait for it any more.
  virtual void abandon(size_t slot) = 0;
  virtual void buckets_changed(size_t buckets) = 0;
};

}  // namespace dpcore
