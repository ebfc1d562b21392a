// See legs.h.
#include "reducer/legs/legs.h"

#include <utility>

#include "comm/base/error.h"
#include "reducer/plan/bucket_plan.h"

namespace dpcore {

Legs::Legs(Journey journey, std::shared_ptr<BucketCommunicator> communicator)
    : journey_(std::move(journey)), communicator_(std::move(communicator)) {
  const bool in_halves = journey_.first() == Leg::reduce_scatter;
  if (in_halves && !communicator_->can_go_in_halves()) {
    throw Unsupported(
        "the schedule reduces by reduce_scatter and all_gather, which go over dpcore's own "
        "communicator on CPUs only; pass comm=dpcore.init(), or schedule='priority', which "
        "all-reduces");
  }
}

size_t Legs::padded(size_t elements, size_t element_size) const {
  if (journey_.first() != Leg::reduce_scatter) {
    return elements;
  }
  const size_t unit =
      static_cast<size_t>(communicator_->world()) * (kGradientAlignment / element_size);
  return (elements + unit - 1) / unit * unit;
}

void Legs::buckets_changed(size_t buckets) {
  parameters_.assign(buckets, {});
  places_.assign(buckets, {});
}

void Legs::begin() { places_.assign(places_.size(), {}); }

std::optional<Leg> Legs::next(size_t b) const {
  const size_t leg = places_.at(b).leg;
  return leg < journey_.size() ? std::optional(journey_[leg]) : std::nullopt;
}

bool Legs::has_updated(size_t b) const {
  for (size_t leg = 0; leg < places_.at(b).leg; ++leg) {
    if (journey_[leg] == Leg::update) {
      return true;
    }
  }
  return false;
}

Collective Legs::first_collective() const {
  return journey_.first() == Leg::reduce_scatter ? Collective::reduce_scatter
                                                 : Collective::all_reduce;
}

const at::Tensor& Legs::gathered(size_t b, const Bucket& bucket) {
  return journey_.updates_parts() ? parameters_of(b, bucket) : bucket.flat;
}

void Legs::start_gather(size_t b, const Bucket& bucket, BucketCall call) {
  call.collective = Collective::all_gather;
  communicator_->start(b, gathered(b, bucket), call);
  places_[b].in_flight = true;
}

void Legs::wait_for_gather(size_t b) {
  communicator_->wait(b);
  places_[b].in_flight = false;
}

void Legs::abandon(size_t b, const Bucket& bucket) {
  communicator_->abandon(b, gathered(b, bucket));
}

at::Tensor Legs::part_of(const Bucket& bucket) const {
  if (bucket.kept.defined()) {
    return bucket.kept;
  }
  const int64_t length = bucket.flat.numel() / communicator_->world();
  return bucket.flat.narrow(0, communicator_->rank() * length, length);
}

const at::Tensor& Legs::parameters_of(size_t b, const Bucket& bucket) {
  at::Tensor& flat = parameters_.at(b);
  if (!flat.defined()) {
    flat = communicator_->allocate(static_cast<size_t>(bucket.flat.numel()),
                                   bucket.flat.scalar_type(), bucket.flat.device());
  }
  return flat;
}

}  // namespace dpcore
