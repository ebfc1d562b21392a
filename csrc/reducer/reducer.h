// Reduces gradients while backward produces them.
//
// An iteration begins when forward has ended: it is *open* until every gradient has arrived once
// and every bucket is complete. What happens to a gradient: autograd has added it to
// `parameter.grad` -> the hook brings it into its bucket (the one copy there is; on a device the
// last one brings all, by one launch: bucket/gradient_copier.h) -> the last one of a bucket makes
// the bucket ready -> the schedule launches it, sooner or later -> somebody waits for it. At the
// end of backward, autograd calls end_of_backward().
//
// A backward that finds no open iteration, though the last forward was synchronised, opens one
// *again*: gradients are added to ones that are averaged already, which averaging keeps. In
// between, gradients may be missing: which ones anybody has is agreed by a map.
//
// All this is a bucket's first leg. On journeys of more legs (launch/journey.h) the iteration goes
// on through the optimizer's step and the next forward, which ends with all of them over.
//
// Who does what: `GradientCopier` brings gradients into buckets and results out, `Launcher` is what
// schedules call and moves buckets along, `UsedMap` agrees on gradients that are missing,
// `GradientHooks` hears autograd. Here is the order of it all.
//
// Memory: the reducer owns buckets; `parameter.grad` is a part of one from the first gradient on,
// unless it is the program's own memory, and whoever holds a gradient when its part is filled anew
// gets a copy. Where only parts of averages are kept, buckets lend each other their memory, and
// `parameter.grad` is nobody's. After the first iteration nothing is allocated here. Threads:
// forward and backward of one model run one after the other; hooks come on the thread that runs
// backward, without the GIL, and no lock is taken. When a rank dies: start() or wait() of its
// communicator throws, with the bucket's name in front; the iteration stays open and the next
// forward raises again.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reducer/backward/failures.h"
#include "reducer/backward/gradient_hooks.h"
#include "reducer/backward/iteration.h"
#include "reducer/backward/output_hooks.h"
#include "reducer/backward/static_graph.h"
#include "reducer/backward/step_times.h"
#include "reducer/backward/step_trace.h"
#include "reducer/backward/step_watch.h"
#include "reducer/backward/used_map.h"
#include "reducer/bucket/bucket.h"
#include "reducer/bucket/gradient_copier.h"
#include "reducer/bucket/gradient_norms.h"
#include "reducer/legs/launcher.h"

namespace dpcore {

class Reducer final : public std::enable_shared_from_this<Reducer>, private GradientListener {
 public:
  struct Settings {
    std::vector<uint64_t> caps;
    bool find_unused = false;
    bool grad_is_part = true;  // false: results are copied back to a grad of its own
    bool skip_unused = false;  // buckets of unused gradients only: the same ones on all ranks
    bool static_graph = false;
    std::string profiled_as;  // of buckets on their way, in torch's profiler; empty: not here
    uint64_t tag = 0;         // of the model, so that ranks don't mix up models that look alike
    uint64_t traced_as = 0;   // its number in traces
    std::string model;        // its name in messages
    std::string advice;       // about a Mismatch, appended to it
  };
  // What needs the Python interpreter, whose lock none of this holds.
  struct Callbacks {
    // Called in a catch block: throws what autograd carries to Python as the right class.
    std::function<void()> raise;
    // Averages the gradients with these numbers, which came as sparse tensors.
    std::function<void(const std::vector<size_t>&)> reduce_sparse;
    // The optimizer's step for the gradients of this bucket, or for this rank's part of them.
    std::function<void(const std::vector<size_t>&)> update;
  };

  // `modules`: numbers of the gradients that belong to each module, for schedules that ask.
  Reducer(std::vector<Gradient> gradients, std::vector<std::vector<size_t>> modules,
          Settings settings, std::shared_ptr<BucketCommunicator> communicator,
          std::shared_ptr<LaunchSchedule> schedule, Callbacks callbacks);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before forward: waits for what a schedule left in flight; raises when the last backward did
  // not reach every parameter.
  void begin_forward();
  // After forward: opens an iteration, or (not synchronised) lets gradients be until the next
  // one. `outputs`: of a synchronised forward, those whose backward averages.
  void end_forward(bool synchronised, const std::vector<at::Tensor>& outputs);
  void forward_of_module_begins(size_t module) { launcher_.forward_of_module_begins(module); }
  // Tells the schedule, and waits for what it leaves in flight even then.
  void optimizer_steps();
  // Waits for what a schedule left in flight at the end of backward; after update_steps(), for the
  // whole journey.
  void wait_for_gradients();

  // For journeys with an update: an optimizer has noted what it will do with these gradients.
  // Returns false when nothing is left of the journey, so that the optimizer has to step by itself.
  bool update_steps() { return launcher_.update_steps(withheld_); }
  // Every bucket to the end of its journey. Without update_steps() no bucket is updated.
  void finish_journeys() { launcher_.finish_journeys(); }
  // The noted step, if there is one: from here on parameters are those after it.
  void flush() {
    if (iteration_.stepped) {
      finish_journeys();
    }
  }
  // Numbers of the gradients that each module needs, as forward came by the modules.
  void set_modules(std::vector<std::vector<size_t>> modules) {
    launcher_.set_modules(std::move(modules));
  }
  bool is_on_journey() const { return iteration_.is_on_journey(); }
  // Somebody has been told of an error of a bucket on its way.
  bool has_failed() const { return failure_.first != nullptr; }
  // Whether forward may read the parameter of this gradient: nothing that is noted will change it.
  bool is_current(size_t gradient) const {
    const size_t b = launcher_.bucket_of(gradient);
    return !iteration_.stepped || !is_on_journey() || b == LaunchControl::kNoBucket ||
           launcher_.legs().is_over(b);
  }
  // This rank's part of a bucket's averages.
  at::Tensor part_of(size_t b) const { return launcher_.legs().part_of(buckets_.at(b)); }
  size_t whole_buckets() const { return launcher_.whole_buckets(); }
  const at::Tensor& parameters_of(size_t b) { return launcher_.parameters_of(b); }
  // False within a backward that has not brought the average of this gradient yet.
  bool is_averaged(size_t gradient) const;

  // Two reducers of the same parameters (a module that was wrapped again while its first wrapper
  // lives): gradients belong to the one whose forward ran last.
  void share_parameters_with(const std::shared_ptr<Reducer>& other);
  // Called with true when backward ends with buckets in flight: from then on nobody may read their
  // gradients without wait_for_gradients(). False: that cannot be had. Called with false when
  // they are final.
  using Withhold = std::function<bool(bool in_flight)>;
  void withhold_by(Withhold withhold) { withhold_ = std::move(withhold); }

  // Whether a backward has begun to bring gradients, and not brought all of them. Not when another
  // reducer of these parameters has gone on since then.
  bool is_incomplete() const { return iteration_.open && iteration_.arrived > 0 && synchronised_; }
  // Whether that backward is over, and was not interrupted.
  bool has_ended_incomplete() const { return is_incomplete() && has_ended_; }
  // Raises the error that ended that backward, or the names of what is missing.
  void check_complete();

  // Of the outermost backward, when there are backwards within: its end is the end.
  void outermost_backward_begins();
  // What this rank would send in a backward, as zeros: it has no inputs any more, others have.
  void shadow_backward();
  // Averages are multiplied by it: for averages over fewer ranks than there are.
  void set_scale(double scale) { copier_.set_scale(scale); }

  // Instead of all-reduces, from the next backward on; nullptr: all-reduces again.
  void use_hook(std::unique_ptr<BucketHook> hook);
  // From the next backward on, buckets of wider types travel, and are averaged, as this one: half
  // the bytes, and its precision. `parameter.grad` keeps its own type.
  void reduce_as(at::ScalarType type);
  // From the first iteration on.
  void set_static_graph();
  // Of the next iteration, if forward opens it, on all ranks: gradient_norms.h.
  void measure_norms(double variance) { norms_.measure_next(variance); }
  std::vector<GradientNorms::Step> take_norms() { return norms_.take(); }
  // No gradient is noticed from here on.
  void stop_listening() { hooks_.reset(); }

  // The buckets follow the order of arrival once, after the first complete iteration. Rank 0's
  // order is the one that all ranks use. Their moments are noted until then.
  bool wants_rebuild() const {
    return !rebuilt_ && !settings_.find_unused && iteration_.completed > 0;
  }
  const std::vector<size_t>& arrival_order() const { return arrival_; }
  const std::vector<int64_t>& arrival_ns() const { return arrival_ns_; }
  // `caps`: other ones from now on; empty: as before.
  void rebuild(const std::vector<size_t>& order, std::vector<uint64_t> caps);
  // From the next forward on. The buckets stay as they are: both cut them alike.
  void use_schedule(std::shared_ptr<LaunchSchedule> schedule);
  // How long the last complete iteration took, from its first gradient until all were final.
  int64_t backward_ns() const { return backward_ns_; }

  // For traces: whether anybody records, and the two moments that only Python sees.
  bool is_recorded() const { return trace_.is_recorded(); }
  void forward_begins() { trace_.begin_compute(forward_, "forward", iteration_.number); }
  void forward_ends() { trace_.end_compute(forward_, "forward", iteration_.number); }
  void backward_begins() { trace_.begin_compute(backward_, "backward", iteration_.number); }

  const std::vector<Bucket>& bucket_list() const { return buckets_; }
  const std::vector<Gradient>& gradient_list() const { return gradients_; }
  const LaunchSchedule& schedule() const { return launcher_.schedule(); }
  uint64_t completed_iterations() const { return iteration_.completed; }
  // How many ranks had each gradient, when that was agreed on last.
  const std::vector<int32_t>& used_counts() const { return used_.counts(); }
  // Whether all iterations so far had the same unused parameters.
  bool is_graph_static() const { return !graph_changed_; }
  bool has_rebuilt() const { return rebuilt_; }
  // How gradients came into buckets and results out of them.
  const GradientCopier::Counts& copies() const { return copier_.counts(); }
  int64_t first_gradient_ns() const { return iteration_.first_gradient_ns; }
  StepTimes& times() { return times_; }
  StepWatch& watch() { return watch_; }

 private:
  // GradientListener
  void gradient_ready(size_t i, const at::Tensor& incoming) override;
  void refuse_tracing() override;

  int rank() const { return communicator_->rank(); }
  void make_buckets(const std::vector<size_t>& order, bool rebuilding);
  void open(bool again);
  void begin_backward_if_new();
  void take(size_t i);  // a gradient that is there, dense or sparse
  void arrive(size_t i);
  void arrive_without_gradient(size_t i);
  bool is_expected() const;
  void accumulate(size_t i);
  bool is_last_of_static_graph(size_t i);
  void arrive_as_recorded();
  void find_unused();
  void agree_on_unused();
  void queue_end_of_backward();
  void end_of_backward();
  void make_undefined();
  void finish_iteration();
  void note_ways();
  void await_or_withhold();
  void give_back();
  void stand_back();
  bool shares_parameters() const;
  void wait_for_gradients_if_possible();
  bool is_usable() const;

  std::vector<Gradient> gradients_;
  std::vector<Bucket> buckets_;
  Settings settings_;
  std::shared_ptr<BucketCommunicator> communicator_;
  Callbacks callbacks_;
  Withhold withhold_;      // or none
  bool withheld_ = false;  // until the buckets in flight are complete
  std::vector<std::weak_ptr<Reducer>> shared_with_;
  std::unique_ptr<StaticGraph> static_graph_;  // or none
  GradientNorms norms_;
  bool rebuilt_ = false;

  Iteration iteration_;
  bool synchronised_ = false;     // gradients are averaged: as the last forward has it
  bool only_of_outputs_ = false;  // but one that is not to be has followed the one that is
  OutputHooks output_hooks_;
  int graph_task_ = -1;  // the run of autograd that will call end_of_backward()
  std::vector<size_t> arrival_;
  std::vector<int64_t> arrival_ns_;  // of the same, until buckets are rebuilt
  std::vector<uint8_t> reached_;     // by the outputs of forward; empty: all
  std::vector<size_t> undefined_;    // arrived, but autograd had no gradient for them
  std::vector<size_t> sparse_;       // arrived as sparse tensors
  bool has_ended_ = false;           // a backward, though not with all gradients
  bool outermost_is_known_ = false;
  std::vector<uint8_t> reached_before_;  // in the last iteration that looked
  bool graph_changed_ = false;
  int64_t backward_ns_ = 0;

  StepFailure failure_;
  StepTrace trace_;
  StepTrace::Compute forward_;
  StepTrace::Compute backward_;
  StepTimes times_;
  StepWatch watch_;
  GradientCopier copier_;
  Launcher launcher_;
  UsedMap used_;

  // Last: destroyed first, so that no hook comes to a half-destroyed object.
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace dpcore
