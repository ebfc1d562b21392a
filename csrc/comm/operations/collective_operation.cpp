// The life of a collective: everything but what it waits for and the bodies. First whether ranks
// called the same: fingerprints lie in slots of control blocks, and reading a peer's moves a cache
// line. Last what a collective says about itself, in messages and traces.
#include "comm/operations/collective_operation.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fault.h"
#include "comm/collective/path.h"
#include "comm/collective/request.h"
#include "comm/memory/peer_memory.h"
#include "comm/operations/path_run.h"

namespace dpcore {
namespace {

constexpr const char* kAdvice =
    "make every rank call the same operations in the same order with the same arguments";

bool has_entered(const Group& group, int r, uint64_t number) {
  return group.slot(r, number).posted.load(std::memory_order_acquire) > number;
}

// Only wrapped models broadcast with a layout.
bool is_of_a_model(const Fingerprint& what) {
  return what.collective == static_cast<uint8_t>(Collective::broadcast) && what.layout != 0;
}

// Throws Mismatch where rank r, which has entered the operation, called something else than this
// rank. `is_over`: on this rank.
void check_same_call(const Group& group, int r, uint64_t number, bool is_over) {
  const Fingerprint& ours = group.slot(group.rank(), number).fingerprint;
  const Fingerprint& theirs = group.slot(r, number).fingerprint;
  if (theirs == ours) {
    return;
  }
  std::string text = "the ranks disagree at operation " + std::to_string(number) + ": rank " +
                     std::to_string(group.rank()) + " called " + Group::describe(number, ours) +
                     ", rank " + std::to_string(r) + " called " + Group::describe(number, theirs);
  if (theirs.collective != ours.collective) {
    if (is_of_a_model(theirs) || is_of_a_model(ours)) {
      text +=
          "; a wrapped model broadcasts rank 0's buffers before its forward: to evaluate on one "
          "rank alone, call model.module there";
    }
  } else if (theirs.layout != ours.layout) {
    text += "; the lists of sizes (or the layout of the buckets, or the models) differ";
  }
  if (theirs.algorithm != ours.algorithm) {
    text += "; the algorithms differ (algorithm=, deterministic= or link= of the ranks)";
  }
  throw Mismatch(text +
                 (is_over ? ". This rank was done with it by then; " : ". No data was touched; ") +
                 kAdvice);
}

void check_last_call(const Group& group, int r, uint64_t number) {
  const AbortRecord& record = group.control(r).abort;
  // Asked in this order: what it entered it had entered before it left.
  const bool left_well =
      group.has_left(r) && record.state.load(std::memory_order_acquire) == AbortRecord::none;
  if (has_entered(group, r, number)) {
    check_same_call(group, r, number, true);
  } else if (left_well) {
    throw Mismatch("rank " + std::to_string(r) + " finalized and left without " +
                   Group::describe(number, group.slot(group.rank(), number).fingerprint) +
                   ", which rank " + std::to_string(group.rank()) + " called; " + kAdvice);
  }
}

}  // namespace

// The fence: of two ranks that leave at the same time, at least one sees that the other has
// entered.
void compare_last_calls(SharedState& shared) {
  Group& group = shared.group();
#if !defined(__SANITIZE_THREAD__)  // which does not know fences
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  try {
    for (const uint64_t number : shared.unchecked()) {
      for (int r = 0; r < group.world(); ++r) {
        check_last_call(group, r, number);
      }
    }
  } catch (const Mismatch& problem) {
    group.fail(ErrorKind::mismatch, group.rank(), problem.what());
  }
}

CollectiveOperation::~CollectiveOperation() {
  if (body_.handle) {
    body_.handle.destroy();
  }
}

namespace {

// Where the others may read the input, if this rank may read theirs. `is_mapped`: they reach it
// anyway, or it is empty.
uint64_t address_for_peers(const Endpoint& endpoint, const Request& request, bool is_mapped) {
  const bool reads = endpoint.reads_local_peers() && !swaps_in_place(request) &&
                     (is_mapped || can_be_read(request.input));
  return reads ? reinterpret_cast<uint64_t>(request.input) : Arena::kNowhere;
}

Steps body_of(PathRun& run) {
  switch (run.path) {
    case Path::alone:
      return run_alone(run);
    case Path::barrier:
      return run_barrier_over_link(run);
    case Path::two_shot_push:
      return run_two_shot_push(run);
    case Path::pull:
      return run.reduces() ? run_reducing_pull(run) : run_copies(run);
    case Path::push:
    case Path::shared:
      return run_copies(run);
    case Path::read:
      return run_read(run);
    case Path::two_shot_stage:
      return run_two_shot_stage(run);
    case Path::moves:
      return run_moves(run);
    default:
      return run_stage(run);
  }
}

}  // namespace

void CollectiveOperation::prepare(const std::shared_ptr<SharedState>& shared, Request&& request,
                                  uint64_t number, const std::atomic<uint32_t>* in_flight) {
  if (shared_ != shared) {  // operations are used again and again by one communicator
    shared_ = shared;
    group_ = shared->group_ptr();
    run_.shared = shared_.get();
    run_.group = group_.get();
  }
  run_.request = std::move(request);
  run_.number = number;
  run_.in_flight = in_flight;
  const Request& asked = run_.request;
  const int world = run_.world();
  priority = asked.priority;
  run_.element = size_of(asked.dtype);
  run_.bytes = asked.input_parts.empty() ? bytes_of(asked, world) : bytes_of_parts(asked);
  fingerprint_ = fingerprint_of(asked);
  run_.path = Path::automatic;
  run_.not_finite = {};
  run_.announces_parts = announces_parts(asked);
  const bool fused = world > 1 && !asked.program && asked.collective != Collective::barrier;
  run_.is_small = fused && is_small(asked, world, group_->small_bytes());
  const size_t published = is_gathered(asked.collective) ? asked.count * run_.element : run_.bytes;
  run_.is_tiny = run_.is_small && asked.input_parts.empty() && published <= kTinyBytes &&
                 group_->remote() == nullptr;
  if (asked.program ? !run_.announces_parts : run_.is_tiny) {
    shared_->record_needs_no_stage(number);
  }
  only_gives_ = run_.is_small && !run_.consumes();
  only_takes_ = run_.is_small && world > 2 && comes_from_root(asked.collective) &&
                asked.root != run_.me();  // of two ranks the root is all others
  ends_at_entry_ =
      run_.is_small || (asked.collective == Collective::barrier && !shared_->has_link());
  is_prefilled_ = run_.is_small || (world > 1 && run_.announces_parts);
  run_.await_slot();
  run_.unread_owner = -1;
  phase_ = Phase::slot_free;
}

Operation::Progress CollectiveOperation::advance() {
  if (!run_.poll()) {
    return Progress::blocked;
  }
  switch (phase_) {
    case Phase::slot_free:
      phase_ = Phase::earlier_over;
      if (run_.earlier && !run_.request.program) {  // peers may read once this rank has posted
        run_.await_earlier();
        if (!run_.poll()) {
          return Progress::advanced;
        }
      }
      [[fallthrough]];
    case Phase::earlier_over:
      phase_ = Phase::stage_free;
      if (is_prefilled_ && !run_.is_tiny) {
        run_.await_stage();
        if (!run_.poll()) {
          return Progress::advanced;
        }
      }
      [[fallthrough]];
    case Phase::stage_free:
      fault::reach(fault::Point::entry, run_.me(), run_.number);
      check_what_is_over(false);
      post();
      if (only_gives_) {
        shared_->record_unchecked(run_.number);
        finish_at_entry();
        return Progress::finished;
      }
      phase_ = Phase::posted;
      if (only_takes_) {
        run_.await_one("the root to enter", &OperationSlot::posted, run_.number + 1,
                       run_.request.root);
      } else {
        run_.await_all("every rank to enter", &OperationSlot::posted, run_.number + 1);
      }
      if (!run_.poll()) {
        return Progress::advanced;
      }
      [[fallthrough]];
    case Phase::posted:
      if (only_takes_) {
        check_same_call(*group_, run_.request.root, run_.number, false);
        shared_->record_unchecked(run_.number);
        finish_at_entry();
        return Progress::finished;
      }
      check_fingerprints(run_.number);
      hear_words();
      check_what_is_over(true);
      if (ends_at_entry_) {
        finish_at_entry();
        return Progress::finished;
      }
      if (adopt_if_given_up()) {
        return Progress::blocked;
      }
      phase_ = Phase::all_entered;
      if (run_.earlier) {
        run_.await_earlier();
        if (!run_.poll()) {
          return Progress::advanced;
        }
      }
      [[fallthrough]];
    case Phase::all_entered:
      start_body();
      phase_ = Phase::body;
      run_.awaited = {};
      fault::reach(fault::Point::middle, run_.me(), run_.number);
      [[fallthrough]];
    case Phase::body:
      body_.handle.resume();
  }
  if (!body_.handle.done()) {
    return Progress::advanced;
  }
  if (body_.handle.promise().problem) {
    std::rethrow_exception(body_.handle.promise().problem);
  }
  return Progress::finished;
}

// Where the others find this rank's buffers, if they can reach them.
void CollectiveOperation::show_buffers(OperationSlot& slot) {
  const Request& request = run_.request;
  Arena& arena = group_->endpoint().arena();
  const auto offset_of = [&](const void* at, size_t bytes) -> uint64_t {
    return at == nullptr || bytes == 0 ? 0 : arena.offset_of(at, bytes);
  };
  const MemoryUse use = dpcore::memory_use(request, run_.me(), run_.world());
  slot.input_offset = offset_of(use.read, use.read_bytes);
  slot.output_offset = offset_of(use.written, use.written_bytes);
  const bool may_be_read = !run_.reduces() && !run_.announces_parts &&
                           is_faster_read(request.collective, run_.bytes, run_.world());
  const bool is_mapped = slot.input_offset != Arena::kNowhere;
  slot.input_address =
      may_be_read ? address_for_peers(group_->endpoint(), request, is_mapped) : Arena::kNowhere;
  if (swaps_in_place(request)) {
    slot.input_offset = slot.output_offset = Arena::kNowhere;
  }
}

void CollectiveOperation::post() {
  OperationSlot& slot = run_.own_slot();
  if (!ends_at_entry_) {  // what is over then goes by the slot or the stage
    show_buffers(slot);
  }
  slot.fingerprint = fingerprint_;
  if (run_.request.op == ReduceOp::premul_sum) {
    slot.prescale = run_.request.prescale;
  }
  if (run_.request.words) {
    slot.word = run_.request.words->own;
  }
  slot.reduced.store(0, std::memory_order_relaxed);
  slot.consumed.store(0, std::memory_order_relaxed);
  slot.not_finite = {};
  uint64_t filled = 0;
  if (is_prefilled_) {
    std::byte* stage = run_.is_tiny ? nullptr : run_.take_stage();
    if (run_.announces_parts) {
      auto* announced = reinterpret_cast<uint64_t*>(stage);
      for (int r = 0; r < run_.world(); ++r) {
        announced[r] = run_.outgoing(r).elements;
      }
    }
    if (run_.publishes() && !run_.request.program) {
      fill_stage(run_, 0, run_.stage_quota());
      filled = 1;
    }
    if (run_.is_small) {
      filled = run_.kNoMore;  // one chunk, and it is there
    }
  }
  slot.filled.store(filled, std::memory_order_relaxed);
  group_->mine().record_entered(run_.number, fingerprint_, run_.bytes, now_roughly_ns());
  slot.posted.store(run_.number + 1, std::memory_order_release);
  if (group_->remote() != nullptr) {
    tell_remote_members(run_, is_prefilled_);
  }
  if (!only_gives_ && !only_takes_) {  // else no rank waits for more than finish(), which rings
    group_->ring_others();
  }
}

void CollectiveOperation::start_body() {
  Reach reach;
  for (int r = 0; r < run_.world(); ++r) {
    const OperationSlot& slot = run_.slot(r);
    reach.inputs_mapped &= !run_.publishes(r) || slot.input_offset != Arena::kNowhere;
    reach.outputs_mapped &= !run_.consumes(r) || slot.output_offset != Arena::kNowhere;
    reach.inputs_readable &= slot.input_address != Arena::kNowhere;
  }
  run_.path = choose_path(run_.request, run_.world(), reach);
  body_ = body_of(run_);
}

// A rank that comes after the others have given up finds all that they had put there. It must not
// complete the operation alone and be a step ahead. One that failed later, after it had completed
// this operation, does not keep the others from completing it as well.
bool CollectiveOperation::adopt_if_given_up() {
  for (int r = 0; r < run_.world(); ++r) {
    if (group_->has_failed(r) &&
        run_.slot(r).finished.load(std::memory_order_acquire) <= run_.number) {
      return group_->adopt_failure_of_peer();
    }
  }
  return false;
}

void CollectiveOperation::hear_words() {
  if (run_.request.words) {
    for (int r = 0; r < run_.world(); ++r) {
      run_.request.words->all[r] = run_.slot(r).word;
    }
  }
}

// Everything was there when the last rank posted: no coroutine, no second wait.
void CollectiveOperation::finish_at_entry() {
  if (adopt_if_given_up()) {
    return;
  }
  run_.path = run_.is_small ? Path::stage : Path::barrier;
  fault::reach(fault::Point::middle, run_.me(), run_.number);
  if (run_.is_small) {
    copy_own_piece(run_);
    if (run_.consumes()) {
      consume_stage(run_, 0, run_.stage_quota());
    }
    run_.count_staged_traffic();
  } else {
    run_.count_traffic(0, 0);
  }
  run_.finish(false);
  ring_at_entry();
}

// No rank needs to be woken when this is the only operation in flight: a peer that waits for our
// stage or slot is ahead of us and waits for our next post as well, which rings. With a root there
// may be no such post. Then a rank that waits for data is woken at once, and one that has run out
// of slots when several are free: being woken for each costs two changes of the process every time.
void CollectiveOperation::ring_at_entry() {
  constexpr uint64_t kSlotsPerRing = kSlots / 4;
  if (!run_.has_root()) {
    if (run_.others_in_flight()) {
      group_->ring_others();
    }
    return;
  }
  const int root = run_.request.root;
  const bool gives_to_all = only_gives_ && root == run_.me();
  const bool frees_several = !run_.is_tiny || run_.number % kSlotsPerRing == 0;
  if (gives_to_all || frees_several || run_.others_in_flight()) {
    group_->ring_others();
  } else if (only_gives_) {
    group_->ring(root);
  }
}

bool CollectiveOperation::relieve() {
  return run_.path == Path::moves && shared_->transport().set_aside_unexpected();
}

int64_t CollectiveOperation::next_event_ns() const {
  return std::min(run_.entry_seen_ns > now_ns() ? run_.entry_seen_ns : INT64_MAX,
                  shared_->transport().next_event_ns());
}

bool CollectiveOperation::is_held_back(int r) {
  return run_.entry_seen_ns > now_ns() || shared_->transport().is_held_back(r);
}

void CollectiveOperation::retire() {
  if (group_->failed()) {
    shared_->transport().give_up();
  }
  if (body_.handle) {
    body_.handle.destroy();
    body_.handle = nullptr;
  }
  run_.request.program.reset();
  run_.request.words.reset();
  run_.earlier.reset();
}

namespace {

// A waiting rank that has given no sign of life for so long is stopped (it gives one every 20 ms).
constexpr int64_t kSilenceNs = 200'000'000;

}  // namespace

void CollectiveOperation::check_fingerprints(uint64_t number) const {
  for (int r = 0; r < run_.world(); ++r) {
    check_same_call(*group_, r, number, number != run_.number);
  }
}

// A rank that only gives does not wait for those that take: they compare with the giver's slot
// before they read, but two ranks that both take themselves for the root would never meet. And a
// rank that takes from the root alone has not read the others' slots, which it does not need. So
// they compare later: before the operation that is kSlots later at the latest, which waits for all
// ranks to have finished this one, and `wherever_possible` when it has waited for all of them
// anyway. (The one that is kSlots later may be held back, and urgent ones come past it.) In between
// it compares what is known to be over, many at a time: each read of another rank's slot is a cache
// line on its way. The slots still hold the operation then: they are used again kSlotsKept
// operations later, which has to wait for this rank to finish the one that is kSlots ahead of the
// given one.
void CollectiveOperation::check_what_is_over(bool wherever_possible) const {
  std::vector<uint64_t>& unchecked = shared_->unchecked();
  size_t left = 0;
  for (const uint64_t number : unchecked) {
    bool have_all_entered = shared_->is_known_over(number) || number + kSlots == run_.number;
    if (!have_all_entered && wherever_possible) {
      have_all_entered = true;
      for (int r = 0; r < run_.world() && have_all_entered; ++r) {
        have_all_entered = has_entered(*group_, r, number);
      }
    }
    if (have_all_entered) {
      check_fingerprints(number);
    } else {
      unchecked[left++] = number;
    }
  }
  unchecked.resize(left);
}

std::string CollectiveOperation::describe() const {
  return Group::describe(run_.number, fingerprint_);
}

const char* CollectiveOperation::trace_name() const {
  return name_of(run_.request.collective).data();
}

// One that failed before its path was chosen has run nothing.
void CollectiveOperation::tell_what_ran(TraceEvent& event) const {
  if (run_.path == Path::automatic) {
    return;
  }
  event.path = name_of(run_.path, run_.request.collective);
  event.world = run_.world();
  event.root = run_.has_root() ? run_.request.root : -1;
  if (run_.path == Path::moves) {
    const std::shared_ptr<const Program>& program = run_.request.program;
    event.schedule = program->identity;
    group_->endpoint().trace().keep(program->identity, {program, &program->schedule});
  }
}

bool CollectiveOperation::needs(int r) const {
  return r == run_.unread_owner ||
         run_.slot(r).finished.load(std::memory_order_acquire) <= run_.number;
}

bool CollectiveOperation::waits_for(int r) const {
  return r != run_.me() && (!only_takes_ || r == run_.request.root);
}

int CollectiveOperation::first_late() const {
  for (int r = 0; r < run_.world(); ++r) {
    if (waits_for(r) && run_.slot(r).posted.load(std::memory_order_acquire) <= run_.number) {
      return r;
    }
  }
  // All ranks are in it. One that waits gives signs of life; one that is silent keeps all others
  // waiting, along whatever chain of moves.
  int silent = -1;
  int64_t oldest = now_ns() - kSilenceNs;
  for (int r = 0; r < run_.world(); ++r) {
    const int64_t alive = group_->control(r).alive_ns.load(std::memory_order_relaxed);
    if (r != run_.me() && needs(r) && alive < oldest) {
      oldest = alive;
      silent = r;
    }
  }
  if (silent >= 0) {
    return silent;
  }
  return run_.awaited.next < run_.world() ? run_.awaited.next : -1;
}

std::string CollectiveOperation::describe_late_ranks() const {
  std::string late;
  for (int r = 0; r < run_.world(); ++r) {
    if (waits_for(r) && run_.slot(r).posted.load(std::memory_order_acquire) <= run_.number) {
      late += (late.empty() ? "" : "; ") + ("rank " + std::to_string(r)) +
              " has not entered it: " + group_->last_operation_of(r);
    }
  }
  if (late.empty()) {
    const int peer = first_late();
    late = "every rank has entered it, but rank " + std::to_string(peer) +
           " stopped in the middle (waiting for " + run_.awaited.name + ")";
  }
  return late;
}

}  // namespace dpcore
