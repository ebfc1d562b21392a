// The legs of a bucket's journey: from the gradients of one backward to the parameters that the
// next forward reads. Schedules differ only in where `update` stands and who waits where.
//
//   all_reduce                             averages in `parameter.grad`; the program steps
//   all_reduce, update                     the same, each bucket's step where forward needs it
//   reduce_scatter, all_gather, update     an all-reduce in halves: the second under forward
//   reduce_scatter, update, all_gather     each rank steps its part, and parameters are gathered
//
// The first leg travels in backward, as ever; the others follow each other, bucket by bucket. A
// part is the bucket's flat memory over the number of ranks, so that memory is padded for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dpcore {

enum class Leg : uint8_t { all_reduce, reduce_scatter, update, all_gather };

std::string name_of(Leg leg);

class Journey {
 public:
  Journey() : legs_{Leg::all_reduce} {}
  // Throws Unsupported when it is none of the four above.
  explicit Journey(const std::vector<std::string>& names);

  size_t size() const { return legs_.size(); }
  Leg operator[](size_t at) const { return legs_[at]; }
  Leg first() const { return legs_.front(); }
  // An optimizer's step is one of the legs, so what is left of them runs under the next forward.
  bool updates() const { return legs_.size() > 1; }
  // The second leg sends what the first one leaves.
  bool gathers_gradients() const { return updates() && legs_[1] == Leg::all_gather; }
  // Each rank steps its part of the parameters.
  bool updates_parts() const { return updates() && legs_.back() == Leg::all_gather; }

 private:
  std::vector<Leg> legs_;
};

}  // namespace dpcore
