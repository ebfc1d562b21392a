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
#include <utility>
#include <vector>

#include "comm/base/error.h"
#include "reducer/bucket/bucket.h"
#include "reducer/launch/journey.h"
#include "reducer/plan/bucket_plan.h"

namespace dpcore {

class Legs {
 public:
  // Throws Unsupported when the communicator has not what the journey needs.
  Legs(Journey journey, std::shared_ptr<BucketCommunicator> communicator)
      : journey_(std::move(journey)), communicator_(std::move(communicator)) {
    if (begins_with_half() && !communicator_->can_go_in_halves()) {
      throw Unsupported(
          "the schedule reduces by reduce_scatter and all_gather, which go over dpcore's own "
          "communicators only; pass comm=dpcore.init(), or schedule='priority', which "
          "all-reduces");
    }
  }

  const Journey& journey() const { return journey_; }
  // Elements of flat memory, so that all parts are equal and begin as gradients do.
  size_t padded(size_t elements, size_t element_size) const {
    const size_t unit =
        static_cast<size_t>(communicator_->world()) * (kGradientAlignment / element_size);
    return begins_with_half() ? (elements + unit - 1) / unit * unit : elements;
  }

  void buckets_changed(size_t buckets) {
    parameters_.assign(buckets, {});
    places_.assign(buckets, {});
  }
  // Of the communicator: one per bucket, one for the map of used gradients, one for norms, and one
  // per gather, which may be launched before the first leg is over.
  size_t slots() const { return places_.size() * (begins_with_half() ? 2 : 1) + 2; }
  // No bucket has begun.
  void begin() { places_.assign(places_.size(), {}); }

  std::optional<Leg> next(size_t b) const {
    const size_t leg = places_.at(b).leg;
    return leg < journey_.size() ? std::optional(journey_[leg]) : std::nullopt;
  }
  bool is_over(size_t b) const { return places_[b].leg == journey_.size(); }
  bool has_updated(size_t b) const {
    for (size_t leg = 0; leg < places_.at(b).leg; ++leg) {
      if (journey_[leg] == Leg::update) {
        return true;
      }
    }
    return false;
  }
  bool is_in_flight(size_t b) const { return places_[b].in_flight; }
  void advance(size_t b) { ++places_[b].leg; }
  void drop(size_t b) { places_[b] = {journey_.size(), false}; }

  // What travels on the first leg, and on the next one, which is an all_gather.
  Collective first_collective() const {
    return begins_with_half() ? Collective::reduce_scatter : Collective::all_reduce;
  }
  void start_gather(size_t b, const Bucket& bucket, BucketCall call) {
    call.collective = Collective::all_gather;
    communicator_->start(slot_of_gather(b), gathered(b, bucket), call);
    places_[b].in_flight = true;
  }
  // Returns when it was over; 0 where nobody can tell.
  int64_t wait_for_gather(size_t b) {
    communicator_->wait(slot_of_gather(b));
    places_[b].in_flight = false;
    return communicator_->over_ns(slot_of_gather(b));
  }
  bool is_done(size_t b) const { return communicator_->is_done(slot_of_gather(b)); }
  // Nobody waits for the gather any more.
  void abandon(size_t b, const Bucket& bucket) {
    communicator_->abandon(slot_of_gather(b), gathered(b, bucket));
  }

  // This rank's part of a bucket's gradients.
  at::Tensor part_of(const Bucket& bucket) const {
    if (bucket.kept.defined()) {
      return bucket.kept;
    }
    const int64_t length = bucket.flat.numel() / communicator_->world();
    return bucket.flat.narrow(0, communicator_->rank() * length, length);
  }
  // The memory of a bucket's parameters, made when it is asked for first.
  const at::Tensor& parameters_of(size_t b, const Bucket& bucket) {
    at::Tensor& flat = parameters_.at(b);
    if (!flat.defined()) {
      flat = communicator_->allocate(static_cast<size_t>(bucket.flat.numel()),
                                     bucket.flat.scalar_type(), bucket.flat.device());
    }
    return flat;
  }

 private:
  struct Place {
    size_t leg = 0;
    bool in_flight = false;  // on a leg after the first
  };
  bool begins_with_half() const { return journey_.first() == Leg::reduce_scatter; }
  size_t slot_of_gather(size_t b) const { return places_.size() + 2 + b; }
  const at::Tensor& gathered(size_t b, const Bucket& bucket) {
    return journey_.updates_parts() ? parameters_of(b, bucket) : bucket.flat;
  }

  Journey journey_;
  std::shared_ptr<BucketCommunicator> communicator_;
  std::vector<Place> places_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace dpcore
