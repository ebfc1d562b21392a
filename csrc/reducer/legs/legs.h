// Where each bucket stands on its journey, and the memory that its later legs need.
//
// The reducer takes a bucket over its first leg, as backward fills it. From then on `next()` is the
// leg that it goes next, or is on at the moment; `is_over()` at the end. Who does what at which
// time is the schedule's business, and the reducer's.
//
// Memory: for journeys that gather parameters, a second flat tensor per bucket in which its
// parameters lie as their gradients lie in the first. Owned here; the parameters share it.
// Threads: that of forward and backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "reducer/bucket/bucket.h"
#include "reducer/bucket/bucket_communicator.h"
#include "reducer/launch/journey.h"

namespace dpcore {

class Legs {
 public:
  // Throws Unsupported when the communicator has not what the journey needs.
  Legs(Journey journey, std::shared_ptr<BucketCommunicator> communicator);

  const Journey& journey() const { return journey_; }
  // Elements of flat memory, so that all parts are equal and begin as gradients do.
  size_t padded(size_t elements, size_t element_size) const;

  void buckets_changed(size_t buckets);
  // No bucket has begun.
  void begin();

  std::optional<Leg> next(size_t b) const;
  bool is_over(size_t b) const { return places_[b].leg == journey_.size(); }
  bool has_updated(size_t b) const;
  bool is_in_flight(size_t b) const { return places_[b].in_flight; }
  void advance(size_t b) { ++places_[b].leg; }
  void drop(size_t b) { places_[b] = {journey_.size(), false}; }

  // What travels on the first leg, and on the next one, which is an all_gather.
  Collective first_collective() const;
  void start_gather(size_t b, const Bucket& bucket, BucketCall call);
  void wait_for_gather(size_t b);
  bool is_done(size_t b) const { return communicator_->is_done(b); }
  // Nobody waits for the gather any more.
  void abandon(size_t b, const Bucket& bucket);

  // This rank's part of a bucket's gradients.
  at::Tensor part_of(const Bucket& bucket) const;
  // The memory of a bucket's parameters, made when it is asked for first.
  const at::Tensor& parameters_of(size_t b, const Bucket& bucket);

 private:
  struct Place {
    size_t leg = 0;
    bool in_flight = false;  // on a leg after the first
  };
  const at::Tensor& gathered(size_t b, const Bucket& bucket);

  Journey journey_;
  std::shared_ptr<BucketCommunicator> communicator_;
  std::vector<Place> places_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace dpcore
