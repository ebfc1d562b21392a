// dpcore's own schedules, each a few lines.
#include "reducer/launch/launch_schedule.h"

#include <array>

#include "comm/base/error.h"

namespace dpcore {
namespace {

// ---- until the end of backward ---------------------------------------------------------------
// Then everything is launched, and backward returns when all of it is complete.

// Sends each bucket as soon as its last gradient is there, in the background of backward. None
// overtakes another, since backward ends when all are complete.
// Loses where no processor is free for the progress thread: then it takes the time of backward.
class Bucketed : public LaunchSchedule {
 public:
  std::string name() const override { return "bucketed"; }
  uint32_t listens() const override { return bucket_ready | backward_end; }
  void on_bucket_ready(LaunchControl& control, size_t bucket) override {
    control.launch(bucket, {.priority = 0, .background = true});
  }
  void on_backward_end(LaunchControl& control) override { control.wait_for_all(); }
};

// Everything in one bucket (per dtype): the fewest operations, and nothing to overlap with.
class Flat final : public Bucketed {
 public:
  std::string name() const override { return "flat"; }
  std::vector<uint64_t> caps(std::vector<uint64_t>) const override { return {UINT64_MAX}; }
};

// A bucket per parameter: overlaps the most, pays an operation for each.
class PerParameter final : public Bucketed {
 public:
  std::string name() const override { return "per_parameter"; }
  std::vector<uint64_t> caps(std::vector<uint64_t>) const override { return {0}; }
};

// First all of backward, then all of the communication, on the thread that waits. No thread of
// ours runs beside the computation: the best there is when ranks keep all processors busy and
// memory is fast, the worst on a slow network.
class Sequential final : public LaunchSchedule {
 public:
  std::string name() const override { return "sequential"; }
  uint32_t listens() const override { return backward_end; }
  void on_backward_end(LaunchControl& control) override {
    for (size_t bucket = 0; bucket < control.buckets(); ++bucket) {
      control.launch(bucket, {.priority = 0, .background = false});
    }
    control.wait_for_all();
  }
};

// Computes as data parallel training does and communicates nothing: the bound. Ranks drift apart.
class Oracle final : public LaunchSchedule {
 public:
  std::string name() const override { return "oracle"; }
  bool is_exact() const override { return false; }
  uint32_t listens() const override { return backward_end; }
  void on_backward_end(LaunchControl& control) override {
    for (size_t bucket = 0; bucket < control.buckets(); ++bucket) {
      control.skip(bucket);
    }
  }
};

// ---- across steps ----------------------------------------------------------------------------
// Communication goes on under the next forward: buckets leave as soon as their gradients are there,
// the ones that the next forward needs first overtake the others, and forward waits at each module
// for what it needs.

class AcrossSteps : public LaunchSchedule {
 public:
  uint32_t listens() const override { return bucket_ready | forward_begin; }
  void on_bucket_ready(LaunchControl& control, size_t bucket) override {
    control.launch(bucket, first_half(control, bucket));
  }
  void on_forward_begin(LaunchControl& control, size_t module) override {
    for (const size_t gradient : control.gradients_of_module(module)) {
      if (const size_t bucket = control.bucket_of(gradient);
          bucket != LaunchControl::kNoBucket && control.next_phase(bucket)) {
        bring(control, bucket);
      }
    }
  }

 protected:
  // The module needs it.
  virtual void bring(LaunchControl& control, size_t bucket) { control.wait(bucket); }
  // Buckets are numbered as they get ready, about the reverse of the order of need.
  static Launch first_half(const LaunchControl& control, size_t bucket) {
    return {.priority = static_cast<int>(control.buckets() + bucket), .background = true};
  }
};

// Updates whole buckets. A call of the optimizer costs something, most of all when a module has
// just had the caches, so one call is for all buckets that have come. They are updated while the
// thread would only wait for another bucket, too.
class WholeUpdates : public AcrossSteps {
 protected:
  void bring(LaunchControl& control, size_t bucket) override {
    while (!control.is_over(bucket) && update_what_came(control)) {
    }
    control.wait(bucket);
    update_what_came(control);
  }

 private:
  bool update_what_came(LaunchControl& control) {
    came_.clear();
    for (const size_t bucket : control.order_of_need()) {
      if (control.next_phase(bucket) && control.is_over(bucket)) {
        control.wait(bucket);
        came_.push_back(bucket);
      }
    }
    control.update(came_);
    return !came_.empty();
  }

  std::vector<size_t> came_;
};

// All-reduces go on while the program steps and begins its next forward (P3, ByteScheduler).
// Loses where forward is short, or needs everything at once.
class Priority final : public WholeUpdates {
 public:
  std::string name() const override { return "priority"; }
  Phases phases() const override { return Phases({"all_reduce", "update"}); }
};

// Only the first half of an all-reduce under backward, the second under forward (DeAR).
// Loses against priority where forward is shorter than the second halves.
class Dear final : public WholeUpdates {
 public:
  std::string name() const override { return "dear"; }
  Phases phases() const override { return Phases({"reduce_scatter", "all_gather", "update"}); }
  uint32_t listens() const override { return AcrossSteps::listens() | backward_end; }
  void on_backward_end(LaunchControl& control) override {
    // Both halves of what is needed first go before those of what is needed later.
    for (size_t bucket = 0; bucket < control.buckets(); ++bucket) {
      control.launch(bucket, first_half(control, bucket));
    }
  }
};

// Each rank steps its part of the parameters, and keeps the optimizer's state for that part only
// (ZeRO, stage 1). The parameters are gathered under forward.
// Loses where the step is short and gathering cannot hide.
class Zero1 : public AcrossSteps {
 public:
  std::string name() const override { return "zero1"; }
  Phases phases() const override { return Phases({"reduce_scatter", "update", "all_gather"}); }
  uint32_t listens() const override { return AcrossSteps::listens() | optimizer_step; }
  // All ranks gather in the order of need. They update what has come, while what comes first in
  // that order is on its way.
  void on_optimizer_step(LaunchControl& control) override {
    for (const size_t bucket : control.order_of_need()) {
      while (!control.is_over(bucket) && update_one(control)) {
      }
      gather(control, bucket);
    }
    for (size_t bucket = 0; bucket < control.buckets(); ++bucket) {
      gather(control, bucket);  // what no module needs
    }
  }

 private:
  static bool is_updated(const LaunchControl& control, size_t bucket) {
    return control.next_phase(bucket) == Phase::all_gather;
  }
  static bool update_one(LaunchControl& control) {
    for (const size_t bucket : control.order_of_need()) {
      if (!is_updated(control, bucket) && control.is_over(bucket)) {
        control.wait(bucket);
        control.update(bucket);
        return true;
      }
    }
    return false;
  }
  // First halves go before: step() waits for all of them.
  static void gather(LaunchControl& control, size_t bucket) {
    if (!is_updated(control, bucket)) {
      control.wait(bucket);
      control.update(bucket);
    }
    control.launch(bucket, {.priority = static_cast<int>(bucket), .background = true});
  }
};

// The same, and of the gradients, too, each rank keeps its part only (ZeRO, stage 2). Backward
// waits for the network as soon as this many buckets are on their way, so memory for whole
// gradients does not grow with the model. Loses where gradients come in bursts that the network
// works off later.
class Zero2 final : public Zero1 {
 public:
  std::string name() const override { return "zero2"; }
  size_t whole_buckets() const override { return 4; }
};

// ----------------------------------------------------------------------------------------------

template <class Schedule>
std::shared_ptr<LaunchSchedule> make() {
  return std::make_shared<Schedule>();
}

struct Named {
  const char* name;
  std::shared_ptr<LaunchSchedule> (*make)();
};

// With the names of their twins in dpcore/reference/launches.py, in the same order.
constexpr std::array kSchedules = {
    Named{"bucketed", make<Bucketed>},
    Named{"sequential", make<Sequential>},
    Named{"per_parameter", make<PerParameter>},
    Named{"flat", make<Flat>},
    Named{"oracle", make<Oracle>},
    Named{"priority", make<Priority>},
    Named{"dear", make<Dear>},
    Named{"zero1", make<Zero1>},
    Named{"zero2", make<Zero2>},
};

}  // namespace

std::shared_ptr<LaunchSchedule> make_launch_schedule(const std::string& name) {
  std::string list;
  for (const Named& schedule : kSchedules) {
    if (name == schedule.name) {
      return schedule.make();
    }
    list += (list.empty() ? "" : ", ") + std::string(schedule.name);
  }
  throw Unsupported("schedule '" + name + "' does not exist; there are " + list +
                    ", or write one: subclass dpcore.LaunchSchedule");
}

}  // namespace dpcore
