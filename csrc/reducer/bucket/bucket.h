// A bucket: the memory of gradients that are sent together, and their progress.
//
// A bucket is one flat tensor. Each of its gradients has a part of it, with the strides of its
// parameter, so `parameter.grad` can be that part and optimizers find the strides they expect. The
// bucket is sent from that tensor, or from a second one if it is sent in a narrower type. The
// counters belong to the thread that runs backward.
//
// The program never gets `Gradient::part` itself. A tensor that autograd has made for
// `parameter.grad` is moved onto the part's storage and stays the object it was, so whatever the
// program does to that object (`.data = x`, `set_`, `resize_`) leaves the part as it is, and the
// number of references to the storage tells whether the last gradient is still held. The place of a
// gradient is judged by its address alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reducer/bucket/bucket_communicator.h"
#include "reducer/plan/bucket_plan.h"

namespace dpcore {

struct Bucket;

// One parameter as the reducer sees it.
struct Gradient {
  at::Tensor parameter;
  std::string name;
  at::TensorOptions kind;  // of the parameter when it was wrapped
  bool is_sparse = false;  // expected to come as a sparse tensor: never in a bucket

  size_t bucket = 0;
  at::Tensor part;               // of the bucket
  size_t first_element = 0;      // of the bucket, where the part begins
  std::byte* address = nullptr;  // of the same
  size_t bytes = 0;
  uint64_t iteration = 0;  // the last one in which it was complete

  // Makes the part, anew when it was there.
  void make_part(const at::Tensor& flat);
  // Copies what backward has left in `parameter.grad`, which is not in place, into the part, which
  // nothing else holds.
  void collect();
  // From now on `parameter.grad` is the part's memory. False when it has to stay where it is,
  // because its memory is the program's, or may not move: the result is copied there. `incoming`
  // is a tensor that autograd holds at the moment, or none.
  bool settle(const at::Tensor* incoming, bool may_move);
  // Only autograd has the memory of `parameter.grad`: what is written there, nothing else sees.
  // settle() asks for less, since what it leaves behind stays as it is.
  bool is_autograds_alone(const at::Tensor* incoming) const;
  // `parameter.grad` is the bucket's memory already.
  bool is_in_place() const;
  // The gradient lies as the part does, so that both are copied element by element.
  bool has_layout_of_part() const;
};

struct Bucket {
  std::vector<size_t> gradients;
  at::Tensor flat;
  at::Tensor narrow;      // the same in another type; undefined: flat itself travels
  at::Tensor kept;        // this rank's part, where flat is lent to other buckets afterwards
  at::Tensor parameters;  // laid out as flat, where phases gather parameters; made at first use
  bool together = false;  // gradients are copied at once when all are there
  bool has_own = false;   // a gradient of this iteration stays in the program's memory
  uint64_t bytes = 0;     // of gradients, without padding
  uint64_t layout = 0;    // hash of names and shapes, equal on all ranks

  enum State : uint8_t { filling, launched, complete };
  State state = filling;
  bool skipped = false;
  // With which neighbours it was launched as one operation: itself and the next ones, of the first
  // bucket; the others name that one. See flat_memory.h.
  size_t first_joined = 0;
  size_t joined_count = 1;
  at::Tensor joined;            // of the first: what travels for all
  bool joined_is_copy = false;  // and not their own memory
  bool filled = false;          // what travels has all gradients of this iteration
  size_t missing = 0;           // gradients of this iteration that are not there yet
  // On a device: where the last work on the bucket was put, and whether it was always the same.
  std::optional<c10::Stream> stream;
  bool has_one_stream = true;
  std::unique_ptr<at::RecordFunction> profiled;  // while torch's profiler looks at its way

  const at::Tensor& travelling() const { return narrow.defined() ? narrow : flat; }
};

// Of all of them. The CPU when there are none: all parameters are trained elsewhere.
at::Device device_of(const std::vector<Gradient>& gradients);

// Says once that derivatives of averaged gradients end there, where the program wants them.
void warn_of_graph(const at::Tensor& grad);

// Which gradients travel together, in this order: those that are not sparse. `from_end`: filled
// from the end of the order.
BucketPlan plan_of(const std::vector<Gradient>& gradients, const std::vector<size_t>& order,
                   std::span<const uint64_t> caps, bool from_end);
// Of the flat memory for these gradients, with what aligns each.
size_t flat_elements(const std::vector<size_t>& members, const std::vector<Gradient>& gradients);
// A bucket over flat memory, of which its gradients get their parts.
Bucket make_bucket(size_t number, std::vector<size_t> members, std::vector<Gradient>& gradients,
                   at::Tensor flat);

// "bucket 3 (12 gradients, 25.0 MiB: layer4.weight, layer4.bias, ...)"
std::string describe(size_t number, const Bucket& bucket, const std::vector<Gradient>& gradients);

}  // namespace dpcore
