// When it is worth asking again for what could not go on: a count of whatever may have changed
// that.
//
// A message that finds no connection makes a *claim* to the next one that is free, so that no less
// urgent message takes it before the first one is asked again. Operations are asked in the order of
// their urgency at every poll, but only if something has changed; so a claim holds until both the
// next poll and the next change. Where it turns a message away after a change, at the same poll,
// that change has been used up in vain: the next poll counts as one.
//
// Values only. Under the engine's progress lock.
#pragma once

#include <cstdint>

namespace dpcore {

class Changes {
 public:
  struct Claim {
    uint64_t poll = 0;  // none: both begin at 1
    uint64_t change = 0;
  };

  uint64_t count() const { return count_; }
  void record() { ++count_; }
  void begin_poll() {
    ++polls_;
    count_ += was_in_vain_ ? 1 : 0;
    was_in_vain_ = false;
  }
  Claim claim() const { return {polls_, count_}; }
  // To be asked by a message that the claim would turn away.
  bool holds(const Claim& claim) {
    was_in_vain_ |= claim.poll == polls_ && claim.change != count_;
    return claim.poll == polls_ || claim.change == count_;
  }

 private:
  uint64_t polls_ = 1;
  uint64_t count_ = 1;
  bool was_in_vain_ = false;
};

}  // namespace dpcore
