// The phases of a bucket, from the gradients of one backward to the parameters that the next
// forward reads, and the current phase of each bucket. Schedules differ only in the position of
// `update` and in where they wait.
//
//   all_reduce                             averages in `parameter.grad`; the program steps
//   all_reduce, update                     the same, each bucket's step when forward needs it
//   reduce_scatter, all_gather, update     an all-reduce in halves: the second under forward
//   reduce_scatter, update, all_gather     each rank steps its part, and parameters are gathered
//
// The first phase runs in backward; the others follow, bucket by bucket. A rank's part is the
// bucket's flat memory over the number of ranks, so that memory is padded for it.
//
// This code moves no bytes: the reducer starts operations, waits for them and advances buckets.
// Nothing is allocated after the buckets are made. Threads: that of forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace dpcore {

enum class Phase : uint8_t { all_reduce, reduce_scatter, update, all_gather };

std::string name_of(Phase phase);

class Phases {
 public:
  Phases() : list_{Phase::all_reduce} {}
  // Throws Unsupported when it is none of the four above.
  explicit Phases(const std::vector<std::string>& names);

  size_t size() const { return list_.size(); }
  Phase operator[](size_t at) const { return list_[at]; }
  Phase first() const { return list_.front(); }
  bool begins_with_half() const { return first() == Phase::reduce_scatter; }
  // An optimizer's step is one of them, so what follows the first runs under the next forward.
  bool updates() const { return list_.size() > 1; }
  // The second phase sends what the first one leaves.
  bool gathers_gradients() const { return updates() && list_[1] == Phase::all_gather; }
  // Each rank steps its part of the parameters.
  bool updates_parts() const { return updates() && list_.back() == Phase::all_gather; }

 private:
  std::vector<Phase> list_;
};

// Which phase each bucket is in. A bucket enters its second phase when the first is over; after the
// last it is over, and once all are, so is the step.
class PhaseProgress {
 public:
  explicit PhaseProgress(Phases phases) : phases_(std::move(phases)) {}

  const Phases& phases() const { return phases_; }
  void buckets_changed(size_t buckets) { places_.assign(buckets, {}); }
  // Every bucket is in its first phase.
  void begin() {
    places_.assign(places_.size(), {});
    unfinished_ = places_.size();
  }
  // A step that no backward has followed: there is nothing to finish.
  void cancel() { unfinished_ = 0; }

  // The phase that the bucket is in, or enters next; none after the last.
  std::optional<Phase> next(size_t b) const {
    const size_t at = places_.at(b).at;
    return at < phases_.size() ? std::optional(phases_[at]) : std::nullopt;
  }
  bool is_over(size_t b) const { return places_[b].at == phases_.size(); }
  bool are_all_over() const { return unfinished_ == 0; }
  bool has_updated(size_t b) const {
    for (size_t at = 0; at < places_.at(b).at; ++at) {
      if (phases_[at] == Phase::update) {
        return true;
      }
    }
    return false;
  }
  // The bucket's phase is over.
  void advance(size_t b) { enter(b, places_[b].at + 1); }
  // The bucket goes through no further phase.
  void drop(size_t b) {
    places_[b].is_gathering = false;
    enter(b, phases_.size());
  }

  // Whether an all_gather has been started, perhaps behind a first phase that is not over yet, and
  // not been waited for.
  bool is_gathering(size_t b) const { return places_[b].is_gathering; }
  void set_gathering(size_t b, bool is_gathering) { places_[b].is_gathering = is_gathering; }

 private:
  struct Place {
    size_t at = 0;
    bool is_gathering = false;
  };
  void enter(size_t b, size_t at) {
    places_[b].at = at;
    unfinished_ -= is_over(b) ? 1 : 0;
  }

  Phases phases_;
  std::vector<Place> places_;
  size_t unfinished_ = 0;  // buckets whose phases are not all over
};

}  // namespace dpcore
