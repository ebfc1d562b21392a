// Reduces gradients while backward produces them.
//
// An iteration begins when forward has ended: it is *open* until every gradient has arrived once
// and every bucket is complete. What happens to a gradient: autograd has added it to
// `parameter.grad` -> the hook brings it into its bucket (the one copy there is; on a device the
// last one brings all, by one launch: reducer_copies.cpp) -> the last one of a bucket makes the
// bucket ready -> the schedule launches it, sooner or later -> somebody waits for it. At the end of
// backward, autograd calls end_of_backward().
//
// A backward that finds no open iteration, though the last forward was synchronised, opens one
// *again*: gradients are added to ones that are averaged already, which averaging keeps. In
// between, gradients may be missing: which ones anybody has is agreed by a map.
//
// All this is a bucket's first leg. On journeys of more legs (launch/journey.h) the iteration goes
// on through the optimizer's step and the next forward, which ends with all of them over:
// reducer_journey.cpp.
//
// Memory: the reducer owns buckets; `parameter.grad` is a part of one from the first gradient on,
// unless it is the program's own memory, and whoever holds a gradient when its part is filled anew
// gets a copy. Where only parts of averages are kept, buckets lend each other their memory, and
// `parameter.grad` is nobody's: reducer_lent.cpp. After the first iteration nothing is allocated
// here. Threads: forward and backward of one model run one after the other; hooks come on the
// thread that runs backward, without the GIL, and no lock is taken. When a rank dies: start() or
// wait() of its communicator throws, with the bucket's name in front; the iteration stays open and
// the next forward raises again.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reducer/backward/gradient_hooks.h"
#include "reducer/backward/static_graph.h"
#include "reducer/backward/step_times.h"
#include "reducer/backward/step_watch.h"
#include "reducer/bucket/bucket.h"
#include "reducer/bucket/bucket_communicator.h"
#include "reducer/bucket/bucket_hook.h"
#include "reducer/bucket/gradient_norms.h"
#include "reducer/launch/launch_schedule.h"
#include "reducer/legs/legs.h"
#include "reducer/plan/bucket_plan.h"

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
    std::function<void(size_t)> update;
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
  // one. `outputs` are looked at when unused parameters have to be found.
  void end_forward(bool synchronised, const std::vector<at::Tensor>& outputs);
  void forward_of_module_begins(size_t module);
  // Tells the schedule, and waits for what it leaves in flight even then.
  void optimizer_steps();
  // Waits for what a schedule left in flight at the end of backward; after update_steps(), for the
  // whole journey.
  void wait_for_gradients();

  // For journeys with an update: an optimizer has noted what it will do with these gradients.
  // Returns false when nothing is left of the journey, so that the optimizer has to step by itself.
  bool update_steps();
  // Every bucket to the end of its journey. Without update_steps() no bucket is updated.
  void finish_journeys();
  // The noted step, if there is one: from here on parameters are those after it.
  void flush() {
    if (stepped_) {
      finish_journeys();
    }
  }
  // Numbers of the gradients that each module needs, as forward came by the modules.
  void set_modules(std::vector<std::vector<size_t>> modules);
  bool is_on_journey() const { return unfinished_ > 0 && !open_; }
  // Somebody has been told of an error of a bucket on its way.
  bool has_failed() const { return first_failure_ != nullptr; }
  // Whether forward may read the parameter of this gradient: nothing that is noted will change it.
  bool is_current(size_t gradient) const {
    return !stepped_ || !is_on_journey() || bucket_of(gradient) == kNoBucket ||
           legs_.is_over(bucket_of(gradient));
  }
  // This rank's part of a bucket's averages.
  at::Tensor part_of(size_t b) const { return legs_.part_of(buckets_.at(b)); }
  size_t whole_buckets() const { return whole_buckets_; }
  const at::Tensor& parameters_of(size_t b) { return legs_.parameters_of(b, buckets_.at(b)); }
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
  bool is_incomplete() const { return open_ && arrived_ > 0 && synchronised_; }
  // Whether that backward is over, and was not interrupted.
  bool has_ended_incomplete() const { return is_incomplete() && has_ended_; }
  // Raises the error that ended that backward, or the names of what is missing.
  void check_complete();

  // Of the outermost backward, when there are backwards within: its end is the end.
  void outermost_backward_begins();
  // What this rank would send in a backward, as zeros: it has no inputs any more, others have.
  void shadow_backward();
  // Averages are multiplied by it: for averages over fewer ranks than there are.
  void set_scale(double scale) { scale_ = scale; }

  // Instead of all-reduces, from the next backward on; nullptr: all-reduces again.
  void use_hook(std::unique_ptr<BucketHook> hook);
  // From the next backward on, buckets of wider types travel, and are averaged, as this one: half
  // the bytes, and its precision. `parameter.grad` keeps its own type.
  void reduce_as(at::ScalarType type);
  // From the first iteration on.
  void set_static_graph();
  // Of the next iteration, if forward opens it, on all ranks: gradient_norms.h.
  void measure_norms(double variance);
  std::vector<GradientNorms::Step> take_norms();
  // No gradient is noticed from here on.
  void stop_listening() { hooks_.reset(); }

  // The buckets follow the order of arrival once, after the first complete iteration. Rank 0's
  // order is the one that all ranks use. Their moments are noted until then.
  bool wants_rebuild() const { return !rebuilt_ && !settings_.find_unused && completed_ > 0; }
  const std::vector<size_t>& arrival_order() const { return arrival_; }
  const std::vector<int64_t>& arrival_ns() const { return arrival_ns_; }
  // `caps`: other ones from now on; empty: as before.
  void rebuild(const std::vector<size_t>& order, std::vector<uint64_t> caps);
  // From the next forward on. The buckets stay as they are: both cut them alike.
  void use_schedule(std::shared_ptr<LaunchSchedule> schedule);
  // How long the last complete iteration took, from its first gradient until all were final.
  int64_t backward_ns() const { return backward_ns_; }

  // For traces: whether anybody records, and the two moments that only Python sees.
  bool is_recorded() const {
    const TraceRecorder* trace = communicator_->trace();
    return trace != nullptr && trace->recording();
  }
  void forward_begins() { begin_compute(forward_, "forward"); }
  void forward_ends() { end_compute(forward_, "forward"); }
  void backward_begins() { begin_compute(backward_, "backward"); }

  const std::vector<Bucket>& bucket_list() const { return buckets_; }
  const std::vector<Gradient>& gradient_list() const { return gradients_; }
  const LaunchSchedule& schedule() const { return *schedule_; }
  const std::shared_ptr<BucketCommunicator>& communicator() const { return communicator_; }
  uint64_t completed_iterations() const { return completed_; }
  // How many ranks had each gradient, when that was agreed on last.
  const std::vector<int32_t>& used_counts() const { return used_; }
  // Whether all iterations so far had the same unused parameters.
  bool is_graph_static() const { return !graph_changed_; }
  bool has_rebuilt() const { return rebuilt_; }
  // How gradients came into buckets and results out of them, since the beginning.
  struct Copies {
    uint64_t launches = 0;  // of copies of many at once
    uint64_t together = 0;  // gradients in these
    uint64_t alone = 0;     // gradients that cost a copy, or a cast, each
  };
  const Copies& copies() const { return copies_; }
  int64_t first_gradient_ns() const { return first_gradient_ns_; }
  StepTimes& times() { return times_; }
  StepWatch& watch() { return watch_; }

 private:
  // GradientListener
  void gradient_ready(size_t i, const at::Tensor& incoming) override;
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
  double elapsed_ms() const override;
  size_t in_flight() const override;
  std::vector<double> max_over_ranks(std::vector<double> values) override;
  using LaunchControl::launch;
  void launch(std::span<const size_t> buckets, Launch how) override;
  void skip(size_t b) override;
  void wait(size_t b) override;
  void wait_for_all() override;
  void update(size_t b) override;
  const std::vector<size_t>& order_of_need() const override { return order_of_need_; }
  std::optional<Leg> next_leg(size_t b) const override { return legs_.next(b); }

  void make_buckets(const std::vector<size_t>& order, bool rebuilding);
  void choose_copies(Bucket& bucket);
  void come_to_this_stream(Bucket& bucket);
  void leave_part_to_holders(Gradient& gradient);
  void leave_bucket_to_holders(Bucket& bucket);
  void settle(Gradient& gradient);
  void bring(Gradient& gradient);
  void bring_again(size_t i);
  void gather(Bucket& bucket, std::span<const size_t> members);
  void fill_narrow(Bucket& bucket);
  void make_room(size_t at);
  void fill_lent(Bucket& bucket);
  void hand_out(Bucket& bucket);
  void hand_out_narrow(Bucket& bucket);
  void hand_out_to_own(Bucket& bucket);
  void copy_together(const Bucket& bucket, const at::Tensor& flat, bool to_flat, double factor);
  void open(bool again);
  void begin_backward_if_new();
  void take(size_t i);  // a gradient that is there, dense or sparse
  void arrive(size_t i);
  void arrive_without_gradient(size_t i);
  bool is_last_of_static_graph(size_t i);
  void arrive_as_recorded();
  void find_unused();
  void queue_end_of_backward();
  void end_of_backward();
  void finish_iteration();
  void note_ways();
  void check_launch(std::span<const size_t> buckets) const;
  void launch_in_order();
  void send(std::span<Bucket> buckets, Launch how);
  std::span<Bucket> sent_with(const Bucket& bucket);
  bool is_done(const Bucket& bucket) const;
  void notice_complete();
  void finish_bucket(Bucket& bucket);
  void advance(size_t b);
  void launch_next_leg(size_t b, Launch how);
  void wait_for_leg(size_t b);
  void finish_journey(size_t b);
  void begin_forward_on_journey();
  void find_order_of_need();
  uint64_t salted(uint64_t layout) const;
  void agree_on_unused();
  void leave_out(size_t b);
  void await_or_withhold();
  void give_back();
  void begin_norms();
  void start_norms();
  void finish_norms();
  void make_undefined();
  void stand_back();
  bool shares_parameters() const;
  void wait_for_gradients_if_possible();
  bool is_usable() const;
  std::unique_ptr<at::RecordFunction> profiled_bucket() const;
  void note_moment(const char* name, EventKind kind, uint64_t number, uint64_t bytes, int64_t now);
  struct Compute {         // that is being recorded
    int64_t begin_ns = 0;  // 0: nothing is
    uint64_t span = 0;     // on a device
  };
  void begin_compute(Compute& compute, const char* name);
  void end_compute(Compute& compute, const char* name);
  TraceEvent event_of(const char* name, EventKind kind, uint64_t number) const;
  bool listens(uint32_t event) const { return (listens_ & event) != 0; }
  std::string step_in_words() const;
  [[noreturn]] void raise_changed(const Gradient& gradient) const;
  [[noreturn]] void raise_incomplete() const;
  [[noreturn]] void raise_too_late(size_t i) const;
  // In a catch block.
  [[noreturn]] void raise_with_bucket(size_t b);
  [[noreturn]] void raise_about(const std::string& what, const std::string& after = "");
  std::string which_are_new() const;

  std::vector<Gradient> gradients_;
  std::vector<std::vector<size_t>> modules_;
  Settings settings_;
  std::shared_ptr<BucketCommunicator> communicator_;
  std::shared_ptr<LaunchSchedule> schedule_;
  Callbacks callbacks_;
  Withhold withhold_;      // or none
  bool withheld_ = false;  // until the buckets in flight are complete
  std::vector<std::weak_ptr<Reducer>> shared_with_;
  std::exception_ptr first_failure_;  // of a bucket on its way
  uint32_t listens_ = 0;
  std::unique_ptr<BucketHook> hook_;           // instead of all-reduces, or none
  std::unique_ptr<StaticGraph> static_graph_;  // or none
  double scale_ = 1;
  std::optional<at::ScalarType> narrow_type_;
  const at::Tensor* incoming_ = nullptr;  // autograd holds it during a hook
  std::vector<FlatGradient> copied_;      // of one launch, and whose they are
  std::vector<size_t> copied_of_;
  Copies copies_;
  std::unique_ptr<GradientNorms> norms_;       // or none, as nobody has asked
  std::optional<double> variance_to_measure_;  // of the next iteration
  bool measures_norms_ = false;                // of this one
  std::vector<Bucket> buckets_;
  Legs legs_;
  size_t whole_buckets_ = 0;   // that have memory for all their gradients at a time; 0: all
  std::vector<size_t> order_;  // of launching
  std::vector<size_t> order_of_need_;
  std::vector<size_t> needed_by_none_;  // buckets, of what no module was seen to need
  uint64_t update_steps_ = 0;           // so far, equal on all ranks
  bool rebuilt_ = false;

  // Of the iteration:
  uint64_t iteration_ = 0;
  uint64_t completed_ = 0;
  bool synchronised_ = false;  // whether the last forward was
  bool open_ = false;
  bool again_ = false;
  bool stepped_ = false;     // an optimizer has noted what it does with these gradients
  bool in_forward_ = false;  // a module's forward begins
  int graph_task_ = -1;      // the run of autograd that will call end_of_backward()
  size_t arrived_ = 0;
  std::vector<size_t> arrival_;
  std::vector<int64_t> arrival_ns_;  // of the same, until buckets are rebuilt
  std::vector<uint8_t> reached_;     // by the outputs of forward; empty: all
  std::vector<size_t> undefined_;    // arrived, but autograd had no gradient for them
  std::vector<size_t> sparse_;       // arrived as sparse tensors
  std::vector<std::optional<Launch>> requested_;
  size_t next_launch_ = 0;            // index in order_
  size_t oldest_launched_ = 0;        // the same: all before it are complete
  size_t unfinished_ = 0;             // buckets whose journey is not over
  std::vector<uint8_t> accumulated_;  // since the last synchronised backward, by others
  std::vector<int32_t> used_;         // per gradient: whether this rank, then how many ranks had it
  at::Tensor used_anywhere_;          // the same where collectives reach it
  at::Tensor measured_;               // of max_over_ranks, as large as the most values so far
  bool has_ended_ = false;            // a backward, though not with all gradients
  bool outermost_is_known_ = false;
  std::vector<uint8_t> reached_before_;  // in the last iteration that looked
  bool graph_changed_ = false;
  int64_t first_gradient_ns_ = 0;
  int64_t backward_ns_ = 0;
  Compute forward_;
  Compute backward_;
  StepTimes times_;
  StepWatch watch_;

  // Last: destroyed first, so that no hook comes to a half-destroyed object.
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace dpcore
