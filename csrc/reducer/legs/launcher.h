// The way of buckets: a schedule asks for one, it is sent in the order that all ranks have,
// somebody waits for it, and its gradients are handed out.
//
// This is what a schedule's calls on LaunchControl come to. On journeys of more than one leg
// (launch/journey.h) it goes on from there:
//
//   backward         first legs, in the background
//   update_steps()   the optimizer has noted its step; zero1 updates and gathers
//   forward          each module waits for what it needs, by the schedule's forward_begin
//   end of forward   whatever is left
//
// A program that leaves out the step ends the journey where the update would have been.
//
// Where buckets lend each other their memory (bucket/flat_memory.h): the launch of a bucket waits
// for the one that had its memory before, which every rank has launched before, so ranks that
// launch in one order never wait in a circle. The wait has the deadline and the errors of every
// wait for a bucket.
//
// Threads: that of forward and backward. When a rank dies: what starts or waits throws, with the
// bucket's name in front.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reducer/backward/failures.h"
#include "reducer/backward/iteration.h"
#include "reducer/backward/step_trace.h"
#include "reducer/backward/step_watch.h"
#include "reducer/bucket/bucket.h"
#include "reducer/bucket/gradient_copier.h"
#include "reducer/bucket/gradient_norms.h"
#include "reducer/launch/launch_schedule.h"
#include "reducer/legs/legs.h"

namespace dpcore {

class Launcher final : public LaunchControl {
 public:
  // What of the reducer it sees.
  struct View {
    std::vector<Gradient>& gradients;
    std::vector<Bucket>& buckets;
    std::shared_ptr<BucketCommunicator> communicator;
    GradientCopier& copier;
    Iteration& iteration;
    GradientNorms& norms;
    StepWatch& watch;
    StepTrace& trace;
    StepFailure& failure;
    uint64_t tag = 0;  // of the model
    // The optimizer's step for these buckets.
    std::function<void(const std::vector<size_t>&)> update;
    std::function<void()> iteration_ends;  // the last bucket is over, after backward
  };

  // `modules`: numbers of the gradients that belong to each module, for schedules that ask.
  Launcher(View reducer, std::vector<std::vector<size_t>> modules,
           std::shared_ptr<LaunchSchedule> schedule);

  const LaunchSchedule& schedule() const { return *schedule_; }
  bool listens(uint32_t event) const { return (listens_ & event) != 0; }
  // The buckets stay as they are: both schedules cut them alike.
  void use_schedule(std::shared_ptr<LaunchSchedule> schedule);
  BucketHook* hook() const { return hook_.get(); }  // instead of all-reduces, or none
  void use_hook(std::unique_ptr<BucketHook> hook);
  void set_modules(std::vector<std::vector<size_t>> modules);

  // How many buckets have memory for all their gradients at a time; 0: all.
  size_t whole_buckets() const { return whole_buckets_; }
  const Legs& legs() const { return legs_; }
  const at::Tensor& parameters_of(size_t b) {
    return legs_.parameters_of(b, reducer_.buckets.at(b));
  }
  // The order of launching so many buckets that are about to be made, and then that they are there.
  const std::vector<size_t>& make_order(size_t buckets);
  void buckets_changed();

  void begin_iteration();
  // What backward tells it, and the schedule.
  void gradient_arrived(size_t i) {
    if (listens(LaunchSchedule::bucket_complete)) {
      notice_complete();
    }
    if (listens(LaunchSchedule::gradient_ready)) {
      schedule_->on_gradient_ready(*this, i);
    }
  }
  void bucket_ready(size_t b) {
    if (listens(LaunchSchedule::bucket_ready)) {
      schedule_->on_bucket_ready(*this, b);
    }
  }
  void backward_ends();
  void optimizer_steps();
  void forward_of_module_begins(size_t module);
  // Buckets of parameters that no module was seen to need.
  void forward_begins_on_journey();

  // An optimizer has noted its step; `are_withheld`: nobody has read the gradients yet. False when
  // nothing is left of the journey.
  bool update_steps(bool are_withheld);
  // Every bucket to the end of its journey.
  void finish_journeys();
  // Sends nothing: no rank has anything for the bucket.
  void leave_out(size_t b);
  // Nobody waits for what is on its way.
  void abandon();

  // LaunchControl
  size_t buckets() const override { return reducer_.buckets.size(); }
  size_t bucket_of(size_t i) const override {
    return reducer_.gradients[i].is_sparse ? kNoBucket : reducer_.gradients[i].bucket;
  }
  const std::vector<size_t>& gradients_of_module(size_t module) const override {
    return modules_.at(module);
  }
  uint64_t bytes(size_t b) const override { return reducer_.buckets.at(b).bytes; }
  bool is_complete(size_t b) const override { return reducer_.buckets.at(b).missing == 0; }
  int rank() const override { return reducer_.communicator->rank(); }
  double elapsed_ms() const override;
  size_t in_flight() const override;
  std::vector<double> max_over_ranks(std::vector<double> values) override;
  using LaunchControl::launch;
  void launch(std::span<const size_t> buckets, Launch how) override;
  void skip(size_t b) override;
  void wait(size_t b) override;
  void wait_for_all() override;
  bool is_over(size_t b) const override;
  using LaunchControl::update;
  void update(std::span<const size_t> buckets) override;
  const std::vector<size_t>& order_of_need() const override { return order_of_need_; }
  std::optional<Leg> next_leg(size_t b) const override { return legs_.next(b); }

 private:
  // "bucket 3 (12 gradients, 25.0 MiB: layer4.weight, ...)"
  std::string in_words(size_t b) const {
    return describe(b, reducer_.buckets.at(b), reducer_.gradients);
  }
  // In a catch block.
  [[noreturn]] void raise_about(const std::string& what, const std::string& after = "") {
    reducer_.failure.raise_about(what, reducer_.iteration.step(), after);
  }
  void check_launch(std::span<const size_t> buckets) const;
  void launch_in_order();
  void make_room(size_t at);
  void send(std::span<Bucket> buckets, Launch how);
  std::span<Bucket> sent_with(const Bucket& bucket);
  bool is_done(const Bucket& bucket) const;
  void notice_complete();
  void finish_bucket(Bucket& bucket);
  void hand_out(Bucket& bucket);
  void end_iteration_if_over() {
    if (reducer_.iteration.unfinished == 0 && !reducer_.iteration.open) {
      reducer_.iteration_ends();
    }
  }

  void find_order_of_need();
  uint64_t salted(uint64_t layout) const;
  void advance(size_t b);
  bool may_follow(size_t b) const;
  void launch_next_leg(size_t b, Launch how);
  void wait_for_leg(size_t b);
  void finish_journey(size_t b);
  std::string which_are_new() const;

  View reducer_;
  std::vector<std::vector<size_t>> modules_;
  std::shared_ptr<LaunchSchedule> schedule_;
  uint32_t listens_ = 0;
  std::unique_ptr<BucketHook> hook_;
  Legs legs_;
  size_t whole_buckets_ = 0;
  std::vector<size_t> order_;  // of launching
  std::vector<std::optional<Launch>> requested_;
  size_t next_launch_ = 0;       // index in order_
  size_t oldest_launched_ = 0;   // the same: all before it are complete
  std::vector<size_t> updated_;  // by one call of the optimizer
  std::vector<size_t> order_of_need_;
  std::vector<size_t> needed_by_none_;  // buckets, of what no module was seen to need
  uint64_t update_steps_ = 0;           // so far, equal on all ranks
  bool in_forward_ = false;             // a module's forward begins
  bool backward_ends_ = false;          // the schedule is being told so
  at::Tensor measured_;                 // of max_over_ranks, as large as the most values so far
};

}  // namespace dpcore
