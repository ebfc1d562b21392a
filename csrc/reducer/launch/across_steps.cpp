// What they have in common: buckets leave as soon as their gradients are there, the ones that the
// next forward needs first overtake the others, and forward waits at each module for what it needs.
#include "reducer/launch/across_steps.h"

namespace dpcore {
namespace {

class AcrossSteps : public LaunchSchedule {
 public:
  uint32_t listens() const override { return bucket_ready | forward_begin; }
  // Buckets are numbered as they get ready, about the reverse of the order of need. A first leg
  // goes before the later legs of all others.
  void on_bucket_ready(LaunchControl& control, size_t bucket) override {
    control.launch(bucket,
                   {.priority = static_cast<int>(control.buckets() + bucket), .background = true});
  }
  void on_forward_begin(LaunchControl& control, size_t module) override {
    for (const size_t gradient : control.gradients_of_module(module)) {
      if (const size_t bucket = control.bucket_of(gradient); bucket != LaunchControl::kNoBucket) {
        control.wait(bucket);
        control.update(bucket);
      }
    }
  }

 protected:
  // Sends the second half of a bucket, once the first is over.
  static void gather(LaunchControl& control, size_t bucket) {
    control.launch(bucket, {.priority = static_cast<int>(bucket), .background = true});
  }
};

// All-reduces go on while the program steps and begins its next forward (P3, ByteScheduler).
// Loses where forward is short, or needs everything at once.
class Priority final : public AcrossSteps {
 public:
  std::string name() const override { return "priority"; }
  Journey journey() const override { return Journey({"all_reduce", "update"}); }
};

// Only the first half of an all-reduce under backward, the second under forward (DeAR).
// Loses against priority where ranks wait for the last first half at the end of backward.
class Dear final : public AcrossSteps {
 public:
  std::string name() const override { return "dear"; }
  Journey journey() const override { return Journey({"reduce_scatter", "all_gather", "update"}); }
  uint32_t listens() const override { return AcrossSteps::listens() | backward_end; }
  void on_backward_end(LaunchControl& control) override {
    for (size_t bucket = 0; bucket < control.buckets(); ++bucket) {
      control.wait(bucket);
      gather(control, bucket);
    }
  }
};

// Each rank steps its part of the parameters, and keeps the optimizer's state for that part only
// (ZeRO, stage 1). The parameters are gathered under forward.
// Loses where the step is short and gathering cannot hide.
class Zero1 : public AcrossSteps {
 public:
  std::string name() const override { return "zero1"; }
  Journey journey() const override { return Journey({"reduce_scatter", "update", "all_gather"}); }
  uint32_t listens() const override { return AcrossSteps::listens() | optimizer_step; }
  void on_optimizer_step(LaunchControl& control) override {
    for (size_t bucket = 0; bucket < control.buckets(); ++bucket) {
      control.wait(bucket);
      control.update(bucket);
      gather(control, bucket);
    }
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

}  // namespace

std::shared_ptr<LaunchSchedule> make_priority() { return std::make_shared<Priority>(); }
std::shared_ptr<LaunchSchedule> make_dear() { return std::make_shared<Dear>(); }
std::shared_ptr<LaunchSchedule> make_zero1() { return std::make_shared<Zero1>(); }
std::shared_ptr<LaunchSchedule> make_zero2() { return std::make_shared<Zero2>(); }

}  // namespace dpcore
