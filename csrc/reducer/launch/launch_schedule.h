// Launch schedules decide when buckets are sent and where they are awaited: the part of data
// parallel training that users most often want to replace.
//
// The reducer sends a schedule events (a gradient is ready, a bucket is ready, a bucket is
// averaged, backward has ended, a module's forward begins, an optimizer is about to step); the
// schedule answers by calls on LaunchControl. It decides the sizes of buckets, their order and
// priority, the thread that advances them, and where to wait. It moves no bytes itself. Buckets
// that it leaves in flight are awaited at the end of backward, or, if it listens to optimizer_step,
// by the next optimizer or the first earlier use of a gradient.
//
// A bucket with several phases continues from there: launch() starts its next phase, and wait()
// waits for the current one. Phases are launched in backward, at its end and in optimizer_step, in
// the same order on all ranks; branches of forward may differ, so forward_begin may only wait and
// update. An all_gather of gradients that is launched at the end of backward starts when its
// reduce_scatter is complete; wait() then waits for both.
//
// A schedule may cut buckets into slices, each an operation of its own with a priority of its own:
// slices() names them once, in the order in which they are launched, from the sizes of the buckets.
// The bucket is averaged when all its slices are; memory stays the bucket's.
//
// Ranks launch in the same order even if gradients arrive in different ones: launch() of a bucket
// whose predecessors in order() are not launched yet is remembered and done after them.
//
// Threads: events come from the thread that runs forward or backward, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reducer/phases/phases.h"

namespace dpcore {

struct CallAlgorithm;

struct Launch {
  int priority = 0;        // higher goes first among operations in flight
  bool background = true;  // false: the thread that waits for it drives it, and nothing before
  // Instead of the communicator's own; the same on all ranks. Null: that.
  std::shared_ptr<const CallAlgorithm> algorithm = nullptr;
};

// A range of a bucket's flat memory that is sent by itself.
struct Slice {
  size_t bucket = 0;
  uint64_t begin = 0;  // bytes
  uint64_t end = 0;
};

// What a schedule may ask the reducer for.
class LaunchControl {
 public:
  virtual size_t buckets() const = 0;
  virtual size_t bucket_of(size_t gradient) const = 0;  // kNoBucket for sparse ones
  // Of the module with this number, without its children: see DataParallel.
  virtual const std::vector<size_t>& gradients_of_module(size_t module) const = 0;
  virtual uint64_t bytes(size_t bucket) const = 0;    // of its gradients
  virtual bool is_complete(size_t bucket) const = 0;  // all its gradients are there
  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual double elapsed_ms() const = 0;  // since the first gradient of this backward came
  virtual size_t in_flight() const = 0;   // operations that were sent and are not complete
  // The largest of all ranks' values, place by place, so that ranks may decide alike by what they
  // measured. All ranks call it, each after the same launches.
  virtual std::vector<double> max_over_ranks(std::vector<double> values) = 0;
  // Neighbours go as one operation: numbers without a gap, which also follow each other in order().
  // Which ones must be the same on all ranks.
  virtual void launch(std::span<const size_t> buckets, Launch how) = 0;
  void launch(size_t bucket, Launch how) { launch(std::span<const size_t>(&bucket, 1), how); }
  // Slices of a bucket are numbered in the order of slices(); one that is not cut has one, itself.
  virtual const std::vector<uint64_t>& slices(size_t bucket) const = 0;  // their bytes
  virtual void launch_slice(size_t bucket, size_t slice, Launch how) = 0;
  // Leaves the bucket as it is: no communication, wrong results. For bounds.
  virtual void skip(size_t bucket) = 0;
  // The bucket must have been launched. Returns when its gradients are final.
  virtual void wait(size_t bucket) = 0;
  virtual void wait_for_all() = 0;
  // Whether wait() would return at once.
  virtual bool is_over(size_t bucket) const = 0;
  // The optimizer's part for buckets whose next phase that is, in one call of it; nothing for
  // others, unless their gradients are not there yet, which is an error.
  virtual void update(std::span<const size_t> buckets) = 0;
  void update(size_t bucket) { update(std::span<const size_t>(&bucket, 1)); }
  // Buckets as the next forward needs them, the first one first: learned in rank 0's first forward,
  // the same on all ranks.
  virtual const std::vector<size_t>& order_of_need() const = 0;
  // The phase after the first that the bucket is in, or enters next; none after the last.
  virtual std::optional<Phase> next_phase(size_t bucket) const = 0;

  static constexpr size_t kNoBucket = ~size_t{0};

 protected:
  ~LaunchControl() = default;
};

class LaunchSchedule {
 public:
  enum Event : uint32_t {
    gradient_ready = 1,
    bucket_ready = 2,
    backward_end = 4,
    forward_begin = 8,
    optimizer_step = 16,
    bucket_complete = 32,
    slice_complete = 64,
  };

  virtual ~LaunchSchedule() = default;
  virtual std::string name() const = 0;
  // Whether the results are those of data parallel training.
  virtual bool is_exact() const { return true; }
  virtual Phases phases() const { return {}; }
  // How many buckets at a time have memory for whole gradients, so that each rank keeps its part of
  // the averages only; 0: all. Only where the phases update parts.
  virtual size_t whole_buckets() const { return 0; }
  // Bytes of the first, second, ... bucket, from what the user asked for.
  virtual std::vector<uint64_t> caps(std::vector<uint64_t> wanted) const { return wanted; }
  // In which order buckets are launched. The same on all ranks.
  virtual std::vector<size_t> order(size_t buckets) const {
    std::vector<size_t> all(buckets);
    std::iota(all.begin(), all.end(), size_t{0});
    return all;
  }
  // Where buckets with so many bytes each are cut, in the order in which slices are launched, the
  // same on all ranks. Empty: not at all, and order() holds.
  virtual std::vector<Slice> slices(std::span<const uint64_t>) const { return {}; }
  // Whether it may launch several buckets as one: their memory is then one piece.
  virtual bool may_join() const { return false; }
  // Which events it wants, as a sum of Event. The others cost nothing.
  virtual uint32_t listens() const = 0;

  virtual void on_gradient_ready(LaunchControl&, size_t) {}
  virtual void on_bucket_ready(LaunchControl&, size_t) {}
  // Noticed when a gradient comes, and in waits: no other thread calls a schedule.
  virtual void on_bucket_complete(LaunchControl&, size_t) {}
  // The same of a slice.
  virtual void on_slice_complete(LaunchControl&, size_t, size_t) {}
  virtual void on_backward_end(LaunchControl&) {}
  virtual void on_forward_begin(LaunchControl&, size_t) {}
  virtual void on_optimizer_step(LaunchControl&) {}
};

// Of one of dpcore's own by its name. Throws Unsupported with the list.
std::shared_ptr<LaunchSchedule> make_launch_schedule(const std::string& name);

}  // namespace dpcore
