// Reduces gradients while backward produces them: one state machine for the buckets of a step.
//
// An iteration begins when forward has ended, and is *open* until every gradient has arrived once
// and backward has ended. The path of a gradient: autograd adds it to `parameter.grad` -> the hook
// copies it into its bucket (the only copy; on a device the last gradient of a bucket copies all,
// by one launch: bucket/gradient_copier.h) -> the last gradient makes the bucket ready -> the
// schedule launches it, at once or later -> a wait for it. At the end of backward, autograd calls
// end_of_backward().
//
// A backward that finds no open iteration, though the last forward was synchronised, opens one
// *again*: its gradients are added to averages, which averaging does not change. Such a backward
// may miss gradients: ranks then sum a map of the gradients that they have.
//
// All this is a bucket's first phase. With a schedule of several phases (phases/phases.h) the
// iteration continues through the optimizer's step and the next forward, at whose end all phases
// are complete. The step ends when backward has ended and every bucket has left its last phase:
// advance() is the one place where that happens.
//
//   reducer.cpp            forward opens a step, and its last bucket ends it; how buckets are made
//   reducer_backward.cpp   a gradient, from autograd's hook until its bucket is ready
//   reducer_compiled.cpp   a gradient that a compiled backward announces while it runs
//   reducer_launch.cpp     a bucket, from its launch to its averages: LaunchControl
//   reducer_phases.cpp     its phases after that
//
// Memory: the reducer owns buckets. `parameter.grad` is a part of one from the first gradient on,
// unless it is the program's own memory; tensors that hold a gradient when its part is filled again
// get a copy. If only parts of averages are kept, buckets lend each other their memory, and
// `parameter.grad` must not be read. After the first iteration nothing is allocated here.
// Threads: forward and backward of one model run one after the other; hooks come on the thread
// that runs backward, without the GIL, and no lock is taken. When a rank dies: start() or wait() of
// its communicator throws, with the bucket's name in front; the iteration stays open and the next
// forward raises again. In a block of dp.elastic backward is cut instead.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reducer/backward/autograd_hooks.h"
#include "reducer/backward/birth_plan.h"
#include "reducer/backward/computed_gradients.h"
#include "reducer/backward/static_graph.h"
#include "reducer/backward/step_figures.h"
#include "reducer/backward/step_record.h"
#include "reducer/backward/step_trace.h"
#include "reducer/backward/step_words.h"
#include "reducer/backward/used_map.h"
#include "reducer/bucket/bucket.h"
#include "reducer/bucket/gradient_copier.h"
#include "reducer/bucket/gradient_norms.h"
#include "reducer/bucket/not_finite_gradient.h"
#include "reducer/launch/slices.h"
#include "reducer/phases/phases.h"
#include "tensors/warm_memory.h"

namespace dpcore {

class Reducer final : public std::enable_shared_from_this<Reducer>,
                      private GradientListener,
                      private LaunchControl {
 public:
  struct Settings {
    std::vector<uint64_t> caps;
    bool find_unused = false;
    bool grad_is_part = true;  // false: results are copied back to a grad of its own
    bool skip_unused = false;  // buckets of unused gradients only: the same ones on all ranks
    bool static_graph = false;
    bool born = false;  // warm memory, and gradients in their places where that can be
    bool finds_mistakes =
        false;                // by words (step_words.h), and NaN or Inf where gradients are added
    std::string profiled_as;  // of buckets on their way, in torch's profiler; empty: not here
    uint64_t tag = 0;         // of the model, so that ranks don't mix up models that look alike
    uint64_t traced_as = 0;   // its number in traces
    std::string model;        // its name in messages
    std::string advice;       // about a Mismatch, appended to it
  };
  // Callbacks that need the Python interpreter. The reducer does not hold the GIL.
  struct Callbacks {
    // Called in a catch block: throws what autograd carries to Python as the right class.
    std::function<void()> raise;
    // Averages the gradients with these numbers, which came as sparse tensors.
    std::function<void(const std::vector<size_t>&)> reduce_sparse;
    // The optimizer's step for the gradients of this bucket, or for this rank's part of them.
    std::function<void(const std::vector<size_t>&)> update;
    // At the end of a step, alike on all ranks: their words have these StepWords::Findings.
    std::function<void(uint32_t, const std::vector<Word>&)> differ;
  };

  // `modules`: numbers of the gradients that belong to each module, for schedules that ask.
  Reducer(std::vector<Gradient> gradients, std::vector<std::vector<size_t>> modules,
          Settings settings, std::shared_ptr<BucketCommunicator> communicator,
          std::shared_ptr<LaunchSchedule> schedule, Callbacks callbacks);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // ---- forward and the step: reducer.cpp

  // Before forward: waits for what a schedule left in flight; raises when the last backward did
  // not reach every parameter.
  void begin_forward();
  // After forward: opens an iteration, or (not synchronised) lets gradients be until the next
  // one. `outputs`: of a synchronised forward, those whose backward averages.
  void end_forward(bool synchronised, const std::vector<at::Tensor>& outputs);
  // Tells the schedule, and waits for what it leaves in flight even then.
  void optimizer_steps();
  // An optimizer of these parameters has stepped.
  void optimizer_stepped() { words_.optimizer_stepped(progress_.phases().updates()); }
  // Waits for what a schedule left in flight at the end of backward; after update_steps(), for all
  // phases.
  void wait_for_gradients();
  // Called with true when backward ends with buckets in flight: from then on nothing may read their
  // gradients without wait_for_gradients(). False: that cannot be had. Called with false when
  // they are final.
  using Defer = std::function<bool(bool in_flight)>;
  void defer_by(Defer defer) { defer_ = std::move(defer); }

  // Whether a backward has begun to bring gradients, and not brought all of them. Not when another
  // reducer of these parameters has gone on since then.
  bool is_incomplete() const { return iteration_.open && iteration_.arrived > 0 && synchronised_; }
  // Whether that backward is over, and was not interrupted.
  bool has_ended_incomplete() const { return is_incomplete() && has_ended_; }
  // Raises the error that ended that backward, or the names of what is missing.
  void check_complete();
  // Backward is over, and buckets are not.
  bool is_in_flight() const { return !progress_.are_all_over() && !iteration_.open; }
  // The program has been told of an error of a bucket in flight.
  bool has_failed() const { return failure_ != nullptr; }
  // False within a backward that has not brought the average of this gradient yet.
  bool is_averaged(size_t gradient) const;

  // Two reducers of the same parameters (a module that was wrapped again while its first wrapper
  // lives): gradients belong to the one whose forward ran last.
  void share_parameters_with(const std::shared_ptr<Reducer>& other);

  // Instead of all-reduces, from the next backward on; nullptr: all-reduces again.
  void use_hook(std::unique_ptr<BucketHook> hook);
  // From the next backward on, buckets of wider types travel, and are averaged, as this one: half
  // the bytes, and its precision. `parameter.grad` keeps its own type.
  void reduce_as(at::ScalarType type);
  // From the first iteration on.
  void set_static_graph();
  // Averages are multiplied by it: for averages over fewer ranks than there are.
  void set_scale(double scale) { copier_.set_scale(scale); }
  // Of the next iteration, if forward opens it, on all ranks: gradient_norms.h.
  GradientNorms& norms() { return norms_; }
  // No gradient is noticed from here on.
  void stop_listening() { hooks_.reset(); }
  // If on, a backward that PeerLost or Timeout ends does not raise: it is cut, and this
  // reducer averages nothing any more. Its caller looks at is_cut() before gradients are used.
  void cut_instead_of_raising(bool on) { may_cut_ = on; }
  bool is_cut() const { return is_cut_; }

  // The buckets follow the order of arrival once, after the first complete iteration. Rank 0's
  // order is the one that all ranks use.
  bool wants_rebuild() const {
    return !rebuilt_ && !settings_.find_unused && iteration_.completed > 0;
  }
  // `caps`: other ones from now on; empty: as before.
  void rebuild(const std::vector<size_t>& order, std::vector<uint64_t> caps);
  // From the next forward on. The buckets stay as they are: both cut them alike.
  void use_schedule(std::shared_ptr<LaunchSchedule> schedule);
  // Numbers of the gradients that each module needs, as forward came by the modules.
  void set_modules(std::vector<std::vector<size_t>> modules);

  // ---- backward: reducer_backward.cpp

  // Of the outermost backward, when there are backwards within: its end is the end.
  void outermost_backward_begins();
  // What this rank would send in a backward, as zeros: it has no inputs any more, others have.
  void shadow_backward();

  // ---- buckets after backward: reducer_phases.cpp

  void forward_of_module_begins(size_t module);
  // For phases with an update: an optimizer has recorded what it will do with these gradients.
  // Returns false when nothing is left to do, so that the optimizer has to step by itself.
  bool update_steps();
  // Every bucket to the end of its phases. Without update_steps() no bucket is updated.
  void finish_phases();
  // The recorded step, if there is one: from here on parameters are those after it.
  void flush() {
    if (iteration_.stepped) {
      finish_phases();
    }
  }
  // Whether forward may read the parameter of this gradient: no recorded step will change it.
  bool is_current(size_t gradient) const {
    const size_t b = bucket_of(gradient);
    return !iteration_.stepped || !is_in_flight() || b == kNoBucket || progress_.is_over(b);
  }
  // This rank's part of a bucket's averages.
  at::Tensor part_of(size_t b) const;
  // The memory of a bucket's parameters, laid out as that of its gradients.
  const at::Tensor& parameters_of(size_t b);
  // How many buckets have memory for all their gradients at a time; 0: all.
  size_t whole_buckets() const { return whole_buckets_; }

  // ---- what there is to see

  // For traces: whether anything records, and the moments that only Python sees.
  bool is_recorded() const { return trace_.is_recorded(); }
  void forward_begins() { trace_.begin_compute(forward_, "forward", iteration_.number); }
  void forward_ends() { trace_.end_compute(forward_, "forward", iteration_.number); }
  void backward_begins() { trace_.begin_compute(backward_, "backward", iteration_.number); }

  const std::vector<Bucket>& bucket_list() const { return buckets_; }
  const std::vector<Gradient>& gradient_list() const { return gradients_; }
  const LaunchSchedule& schedule() const { return *schedule_; }
  uint64_t completed_iterations() const { return iteration_.completed; }
  // How many ranks had each gradient, when that was agreed on last.
  const std::vector<int32_t>& used_counts() const { return used_.counts(); }
  // Whether all iterations so far had the same unused parameters.
  bool is_graph_static() const { return !graph_changed_; }
  bool has_rebuilt() const { return rebuilt_; }
  // Whether gradients with NaN or Inf are found while they are added; and the first one of the last
  // step, as far as this rank has seen, or null.
  bool finds_not_finite() const {
    return settings_.finds_mistakes && !hook_ && communicator_->finds_not_finite();
  }
  // During the updates of a step that goes on under forward, what was found before it is past.
  const NotFiniteGradient* not_finite() const {
    return not_finite_.of(iteration_.completed + (is_in_flight() ? 1 : 0));
  }
  // Gradients that were averaged while a compiled backward ran, in the last iteration; and those
  // that compiled backwards delivered, early or not, in the last iteration that was looked at: the
  // first ones, until the buckets are rebuilt, and the one after look_again().
  size_t early_gradients() const { return computed_.count(); }
  size_t compiled_gradients() const { return record_.arrival.empty() ? 0 : from_compiled_; }
  const std::vector<const char*>& declined_gradients() const { return computed_.declined(); }
  void look_again() { looks_at_compiled_ = true; }
  // How gradients came into buckets and results out of them.
  const GradientCopier::Counts& copies() const { return copier_.counts(); }
  // How each gradient came last; null: all are copied.
  const BirthPlan* births() const { return births_.get(); }
  // When the parts of the step that runs, or ran last, happened, and what follows from that.
  const StepRecord& record() const { return record_; }
  StepSums& sums() { return sums_; }
  StepSamples& samples() { return samples_; }
  StepWords& words() { return words_; }

 private:
  // GradientListener
  void gradient_ready(size_t i, const at::Tensor& incoming) override;
  bool gradient_computed(size_t i, const at::Tensor& value) override;
  void decline(size_t i, const char* why) override;
  bool is_taken(size_t i, const at::Tensor& delivered) override;
  void refuse_tracing() override;

  // LaunchControl
  size_t buckets() const override { return buckets_.size(); }
  size_t bucket_of(size_t i) const override {
    return gradients_[i].is_sparse ? kNoBucket : gradients_[i].bucket;
  }
  const std::vector<size_t>& gradients_of_module(size_t module) const override {
    return modules_.at(module);
  }
  uint64_t bytes(size_t b) const override { return buckets_.at(b).bytes; }
  bool is_complete(size_t b) const override { return buckets_.at(b).missing == 0; }
  int rank() const override { return communicator_->rank(); }
  int world() const override { return communicator_->world(); }
  double elapsed_ms() const override;
  size_t in_flight() const override;
  std::vector<double> max_over_ranks(std::vector<double> values) override;
  using LaunchControl::launch;
  void launch(std::span<const size_t> buckets, Launch how) override;
  const std::vector<uint64_t>& slices(size_t b) const override { return slice_bytes_.at(b); }
  void launch_slice(size_t b, size_t slice, Launch how) override;
  void skip(size_t b) override;
  void wait(size_t b) override;
  void wait_for_all() override;
  bool is_over(size_t b) const override;
  using LaunchControl::update;
  void update(std::span<const size_t> buckets) override;
  const std::vector<size_t>& order_of_need() const override { return order_of_need_; }
  std::optional<Phase> next_phase(size_t b) const override { return progress_.next(b); }

  // The step
  void make_buckets(const std::vector<size_t>& order, bool rebuilding);
  void buckets_changed();
  void cut_buckets();
  void refuse_slices_with(const BucketHook* hook) const;
  void find_order_of_need();
  bool listens(uint32_t events) const { return (listens_ & events) != 0; }
  void open(bool again);
  enum class Next : uint8_t { phase, none };
  void advance(size_t b, Next next = Next::phase);
  void end_step_if_over();
  void finish_iteration();
  void hear_words(uint64_t step);
  void make_undefined();
  void await_or_defer();
  void give_back();
  void stand_back();
  bool shares_parameters() const;
  void wait_for_gradients_if_possible();
  bool is_usable() const;
  // "bucket 3 (12 gradients, 25.0 MiB: layer4.weight, ...)"
  std::string in_words(size_t b) const { return describe(b, buckets_.at(b), gradients_); }
  std::string step_in_words() const { return "step " + std::to_string(iteration_.step()); }
  [[noreturn]] void raise_about(const std::string& what, const std::string& after = "");
  [[noreturn]] void raise_incomplete() const;
  void tell_autograd();

  // Backward
  bool is_expected() const;
  const char* why_declined(size_t i, const at::Tensor& value) const;
  void look_at_compiled();
  void accumulate(size_t i);
  void take(size_t i);
  BirthPlan::Place place_of(size_t i);
  void arrive(size_t i);
  void arrive_without_gradient(size_t i);
  bool is_last_of_static_graph(size_t i);
  void arrive_as_recorded();
  void begin_backward_if_new();
  void find_unused();
  void agree_on_unused();
  void queue_end_of_backward();
  void end_of_backward();
  void launch_the_rest();

  // Launches, waits and later phases

  // What is launched by itself: a bucket, or a slice of one.
  struct SliceState {
    Slice slice;
    size_t number = 0;  // in its bucket
    std::optional<Launch> requested = std::nullopt;
    Bucket::State state = Bucket::filling;
    int64_t over_ns = 0;     // 0 where nothing can tell
    at::Tensor memory = {};  // of what travels; undefined: all of it

    void begin() { requested.reset(), state = Bucket::filling, over_ns = 0; }
  };
  void check_launch(std::span<const size_t> buckets) const;
  void launch_in_order();
  void make_room(size_t at);
  std::span<Bucket> sent_with(const Bucket& bucket);
  bool is_requested(size_t b) const;
  void request(size_t at, const Launch& how);
  void send(std::span<Bucket> together, SliceState& slice);
  const at::Tensor& memory_of(SliceState& slice);
  size_t slot_of(const SliceState& slice) const;
  std::string in_words(const SliceState& slice) const;
  void leave_out(size_t b);
  void abandon();
  bool is_done(const SliceState& slice) const;
  void wait_for_slice(size_t at);
  void tell_of_complete_buckets();
  bool has_come(size_t b) const;
  void finish_first_phase(size_t b);
  void hand_out(Bucket& bucket);
  void wait_for_what_no_module_needs();
  bool may_follow(size_t b) const;
  void launch_next_phase(size_t b, const Launch& how);
  void wait_for_gather(size_t b);
  const at::Tensor& gathered(size_t b);
  void finish_phases_of(size_t b);
  uint64_t salted(uint64_t layout) const;
  std::string which_are_new() const;
  // Of the communicator: one per bucket, one each for the map of used gradients, norms and words,
  // and one per gather, which may be launched before the first phase is over, or per slice.
  size_t slot_of_norms() const { return buckets_.size() + 1; }
  size_t slot_of_words() const { return buckets_.size() + 2; }
  size_t slot_of_gather(size_t b) const { return buckets_.size() + 3 + b; }

  // From the end of forward until every gradient has arrived once and backward is over.
  struct Iteration {
    uint64_t number = 0;     // also of those that no backward has followed
    uint64_t completed = 0;  // iterations before this one
    bool open = false;       // until the end of backward
    bool again = false;      // gradients are added to ones that are averaged already
    bool stepped = false;    // an optimizer has recorded what it does with these gradients
    size_t arrived = 0;      // gradients

    uint64_t step() const { return completed + 1; }  // as messages count
  };

  std::vector<Gradient> gradients_;
  std::vector<Bucket> buckets_;
  Settings settings_;
  std::shared_ptr<BucketCommunicator> communicator_;
  std::shared_ptr<LaunchSchedule> schedule_;
  Callbacks callbacks_;
  Defer defer_;                 // or none
  bool defers_ = false;         // until the buckets in flight are complete
  std::exception_ptr failure_;  // the first error of a bucket in flight, as one of dpcore's
  bool may_cut_ = false;
  bool is_cut_ = false;
  std::vector<std::weak_ptr<Reducer>> shared_with_;
  std::unique_ptr<StaticGraph> static_graph_;  // or none
  std::unique_ptr<BucketHook> hook_;           // instead of all-reduces, or none
  GradientNorms norms_;
  FirstNotFinite not_finite_;
  GradientCopier copier_;
  ComputedGradients computed_;
  size_t from_compiled_ = 0;  // gradients of the last backward that was looked at
  bool looks_at_compiled_ = true;
  std::unique_ptr<WarmMemory> warm_memory_;
  std::shared_ptr<BirthPlan> births_;
  UsedMap used_;
  StepRecord record_;
  StepSums sums_;
  StepSamples samples_;
  StepWords words_;
  StepTrace trace_;
  StepTrace::Compute forward_;
  StepTrace::Compute backward_;

  Iteration iteration_;
  PhaseProgress progress_;
  bool rebuilt_ = false;
  bool synchronised_ = false;     // gradients are averaged: as the last forward has it
  bool only_of_outputs_ = false;  // but one that is not to be has followed the one that is
  OutputHooks output_hooks_;
  int graph_task_ = -1;            // the run of autograd that will call end_of_backward()
  std::vector<uint8_t> reached_;   // by the outputs of forward; empty: all
  std::vector<size_t> undefined_;  // arrived, but autograd had no gradient for them
  std::vector<size_t> sparse_;     // arrived as sparse tensors
  bool has_ended_ = false;         // a backward, though not with all gradients
  bool outermost_is_known_ = false;
  std::vector<uint8_t> reached_before_;  // in the last iteration that looked
  bool graph_changed_ = false;

  std::vector<std::vector<size_t>> modules_;
  uint32_t listens_ = 0;  // the schedule
  size_t whole_buckets_ = 0;
  std::vector<size_t> order_;                   // of launching
  std::vector<SliceState> slices_;              // in the same order, or in the schedule's own
  std::vector<std::vector<size_t>> slices_of_;  // of each bucket: indices in slices_
  std::vector<std::vector<uint64_t>> slice_bytes_;
  bool cuts_ = false;                    // the schedule cuts buckets
  size_t next_launch_ = 0;               // index in slices_
  size_t oldest_launched_ = 0;           // the same: all before it are complete
  std::vector<size_t> updated_;          // by one call of the optimizer
  std::vector<size_t> order_of_rank_0_;  // gradients as its backward made them, or would
  std::vector<size_t> order_of_need_;
  std::vector<size_t> needed_by_none_;  // buckets, of what no module was seen to need
  uint64_t update_steps_ = 0;           // so far, equal on all ranks
  bool in_forward_ = false;             // a module's forward begins
  bool backward_ends_ = false;          // the schedule is being told so
  at::Tensor measured_;                 // of max_over_ranks, as large as the most values so far

  // Last: destroyed first, so that no hook comes to a half-destroyed object.
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace dpcore
