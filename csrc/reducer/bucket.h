// Memory of gradients that travel together, and the state of their journey.
//
// A bucket is one flat tensor. Each of its gradients has a part of it, laid out as its parameter
// is, so that `parameter.grad` can be that part and optimizers find strides that match. The
// counters belong to the thread that runs backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reducer/collectives.h"

namespace dpcore {

// One parameter as the reducer sees it.
struct Gradient {
  at::Tensor parameter;
  std::string name;
  at::TensorOptions kind;  // of the parameter when it was wrapped
  bool is_sparse = false;  // expected to come as a sparse tensor: never in a bucket

  size_t bucket = 0;
  at::Tensor part;             // of the bucket
  std::byte* place = nullptr;  // of the part, when it lies in memory of this processor
  size_t bytes = 0;
  uint64_t iteration = 0;  // the last one in which it was complete

  // Brings what backward has left in `parameter.grad` into the bucket, unless it is there.
  // `becomes_grad`: from now on `parameter.grad` is the part itself.
  void collect(bool becomes_grad);
  // The bucket's part is `parameter.grad` already.
  bool is_in_place() const;
};

struct Bucket {
  std::vector<size_t> gradients;
  at::Tensor flat;
  uint64_t bytes = 0;   // of gradients, without padding
  uint64_t layout = 0;  // hash of names and shapes, equal on all ranks

  enum State : uint8_t { filling, launched, complete };
  State state = filling;
  bool skipped = false;
  size_t missing = 0;  // gradients of this iteration that are not there yet
  // When, for reports; CLOCK_MONOTONIC.
  int64_t ready_ns = 0;
  int64_t launched_ns = 0;
  int64_t complete_ns = 0;
  std::unique_ptr<at::RecordFunction> profiled;  // while torch's profiler looks at its way
};

// Allocates a bucket and gives its gradients their parts of it.
Bucket make_bucket(size_t number, std::vector<size_t> members, std::vector<Gradient>& gradients,
                   Collectives& collectives);

// "bucket 3 (12 gradients, 25.0 MiB: layer4.weight, layer4.bias, ...)"
std::string describe(size_t number, const Bucket& bucket, const std::vector<Gradient>& gradients);

}  // namespace dpcore
