// The schedules that come with dpcore, each a few lines. What they have in common: at the end of
// backward everything is launched, and backward returns when all of it is complete.
#include "reducer/launch/launch_schedule.h"

#include <array>

#include "comm/base/error.h"
#include "reducer/launch/across_steps.h"

namespace dpcore {
namespace {

// Sends each bucket as soon as its last gradient is there, in the background of backward. Buckets
// that begin their way early matter least urgently: the first layers' gradients are ready last and
// needed first, so later ones overtake.
// Loses where no processor is free for the progress thread: then it takes the time of backward.
class Bucketed : public LaunchSchedule {
 public:
  std::string name() const override { return "bucketed"; }
  uint32_t listens() const override { return bucket_ready | backward_end; }
  void on_bucket_ready(LaunchControl& control, size_t bucket) override {
    control.launch(bucket, {.priority = static_cast<int>(bucket), .background = true});
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

template <class Schedule>
std::shared_ptr<LaunchSchedule> make() {
  return std::make_shared<Schedule>();
}

struct Named {
  const char* name;
  std::shared_ptr<LaunchSchedule> (*make)();
};

// With the names of dpcore/reference/launches.py, in the same order.
constexpr std::array kSchedules = {
    Named{"bucketed", make<Bucketed>},
    Named{"sequential", make<Sequential>},
    Named{"per_parameter", make<PerParameter>},
    Named{"flat", make<Flat>},
    Named{"oracle", make<Oracle>},
    Named{"priority", make_priority},
    Named{"dear", make_dear},
    Named{"zero1", make_zero1},
    Named{"zero2", make_zero2},
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
