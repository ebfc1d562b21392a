// The life of a collective: everything but what it waits for and the bodies.
#include "comm/operations/collective_operation.h"

#include <algorithm>
#include <cstring>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fault.h"
#include "comm/memory/peer_memory.h"

namespace dpcore {

CollectiveOperation::~CollectiveOperation() {
  if (body_.handle) {
    body_.handle.destroy();
  }
}

size_t CollectiveOperation::bytes_of(const Request& request, int world) {
  const bool per_rank = request.collective != Collective::all_reduce &&
                        request.collective != Collective::broadcast &&
                        request.collective != Collective::reduce;
  return request.count * size_of(request.dtype) * (per_rank ? static_cast<size_t>(world) : 1);
}

namespace {

// Of these a rank shows its own part; of all others as much as the operation has bytes, or nothing.
bool is_gathered(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::gather;
}

bool announces_parts(const Request& request) {
  return request.collective == Collective::all_to_all && !request.input_parts.empty();
}

// What arrives would overwrite what has not left yet, unless it goes by the stage.
bool swaps_in_place(const Request& request) {
  return request.collective == Collective::all_to_all && request.input == request.output;
}

// Where the others may read the input, if this rank may read theirs. `is_mapped`: they reach it
// anyway, or it is empty.
uint64_t address_for_peers(const Endpoint& endpoint, const Request& request, bool is_mapped) {
  const bool reads = endpoint.reads_local_peers() && !swaps_in_place(request) &&
                     (is_mapped || can_be_read(request.input));
  return reads ? reinterpret_cast<uint64_t>(request.input) : Arena::kNowhere;
}

}  // namespace

bool CollectiveOperation::is_small(const Request& request, int world) {
  return bytes_of(request, world) <= kSmallBytes && !announces_parts(request) &&
         (request.force == Path::automatic || request.force == Path::stage);
}

void CollectiveOperation::prepare(const std::shared_ptr<SharedState>& shared, Request&& request,
                                  uint64_t number, const std::atomic<uint32_t>* in_flight) {
  if (shared_ != shared) {  // operations are used again and again by one communicator
    shared_ = shared;
    group_ = shared_->group_ptr();
  }
  request_ = std::move(request);
  number_ = number;
  in_flight_ = in_flight;
  priority = request_.priority;
  element_ = size_of(request_.dtype);
  bytes_ = bytes_of(request_, world());
  fingerprint_ = fingerprint_of(request_);
  path_ = Path::automatic;
  announces_parts_ = announces_parts(request_);
  const bool fused = world() > 1 && !request_.program && request_.collective != Collective::barrier;
  is_small_ = fused && is_small(request_, world());
  const size_t published = is_gathered(request_.collective) ? request_.count * element_ : bytes_;
  is_tiny_ = is_small_ && request_.input_parts.empty() && published <= kTinyBytes &&
             group_->remote() == nullptr;
  if (request_.program ? !announces_parts_ : is_tiny_) {
    shared_->note_needs_no_stage(number_);
  }
  only_gives_ = is_small_ && !consumes();
  ends_at_entry_ =
      is_small_ || (request_.collective == Collective::barrier && !shared_->has_link());
  is_prefilled_ = is_small_ || (world() > 1 && announces_parts_);
  awaited_ = {};
  awaited_.name = "its slot to be free";
  awaited_.custom = [](CollectiveOperation& self) { return self.is_slot_free(); };
  unread_owner_ = -1;
  phase_ = Phase::slot_free;
}

void* CollectiveOperation::frame_memory(size_t bytes) {
  if (frame_bytes_ < bytes) {
    frame_ = std::make_unique<std::byte[]>(bytes);
    frame_bytes_ = bytes;
  }
  return frame_.get();
}

Operation::Progress CollectiveOperation::advance() {
  if (!poll()) {
    return Progress::blocked;
  }
  switch (phase_) {
    case Phase::slot_free:
      phase_ = Phase::stage_free;
      if (is_prefilled_ && !is_tiny_) {
        await_stage();
        if (!poll()) {
          return Progress::advanced;
        }
      }
      [[fallthrough]];
    case Phase::stage_free:
      fault::reach(fault::Point::entry, me(), number_);
      check_what_was_given(false);
      post();
      if (only_gives_) {
        shared_->note_unchecked(number_);
        finish_at_entry();
        return Progress::finished;
      }
      phase_ = Phase::posted;
      await_all("every rank to enter", &OperationSlot::posted, number_ + 1);
      if (!poll()) {
        return Progress::advanced;
      }
      [[fallthrough]];
    case Phase::posted:
      check_fingerprints(number_);
      check_what_was_given(true);
      if (ends_at_entry_) {
        finish_at_entry();
        return Progress::finished;
      }
      start_body();
      phase_ = Phase::body;
      awaited_ = {};
      fault::reach(fault::Point::middle, me(), number_);
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

void CollectiveOperation::post() {
  OperationSlot& slot = own_slot();
  Arena& arena = group_->endpoint().arena();
  const auto offset_of = [&](const void* at, size_t bytes) -> uint64_t {
    return at == nullptr || bytes == 0 ? 0 : arena.offset_of(at, bytes);
  };
  if (!is_small_) {  // a small one goes by the slot or the stage anyway
    size_t input_bytes = 0;
    size_t output_bytes = 0;
    for (int r = 0; r < world(); ++r) {
      const Piece out = outgoing(r);
      const Piece in = incoming(r);
      input_bytes = std::max(input_bytes, (out.mine + out.elements) * element_);
      output_bytes = std::max(output_bytes, (in.mine + in.elements) * element_);
    }
    slot.input_offset = offset_of(request_.input, input_bytes);
    slot.output_offset = offset_of(request_.output, output_bytes);
    const bool may_be_read = !reduces() && is_faster_read(request_.collective, bytes_, world());
    const bool is_mapped = slot.input_offset != Arena::kNowhere;
    slot.input_address =
        may_be_read ? address_for_peers(group_->endpoint(), request_, is_mapped) : Arena::kNowhere;
    if (swaps_in_place(request_)) {
      slot.input_offset = slot.output_offset = Arena::kNowhere;
    }
  }
  slot.fingerprint = fingerprint_;
  if (request_.op == ReduceOp::premul_sum) {
    slot.prescale = request_.prescale;
  }
  slot.reduced.store(0, std::memory_order_relaxed);
  slot.consumed.store(0, std::memory_order_relaxed);
  uint64_t filled = 0;
  if (is_prefilled_) {
    std::byte* stage = is_tiny_ ? nullptr : shared_->stage(number_);
    if (stage != nullptr) {
      slot.stage_offset = arena.offset_of(stage, kStageBytes);
    }
    if (announces_parts_) {
      auto* announced = reinterpret_cast<uint64_t*>(stage);
      for (int r = 0; r < world(); ++r) {
        announced[r] = outgoing(r).elements;
      }
    }
    if (publishes() && !request_.program) {
      fill_stage(0, stage_quota());
      filled = 1;
    }
    if (is_small_) {
      filled = kNoMore;  // one chunk, and it is there
    }
  }
  slot.filled.store(filled, std::memory_order_relaxed);
  group_->enter_operation(number_, fingerprint_, bytes_);
  slot.posted.store(number_ + 1, std::memory_order_release);
  if (group_->remote() != nullptr) {
    tell_remote_members();
  }
  if (!only_gives_) {  // else finish() follows at once, and rings
    group_->ring_others();
  }
}

Path CollectiveOperation::choose_path() const {
  if (world() == 1) {
    return Path::alone;
  }
  if (request_.collective == Collective::barrier) {
    return Path::barrier;
  }
  if (request_.program) {
    return Path::moves;
  }
  if (announces_parts_) {
    return Path::stage;
  }
  bool inputs_mapped = true;
  bool outputs_mapped = true;
  bool inputs_in_reach = true;
  for (int r = 0; r < world(); ++r) {
    inputs_mapped &= !publishes(r) || slot(r).input_offset != Arena::kNowhere;
    outputs_mapped &= !consumes(r) || slot(r).output_offset != Arena::kNowhere;
    inputs_in_reach &= slot(r).input_address != Arena::kNowhere;
  }
  const Path wanted = request_.force;
  if (wanted == Path::stage) {
    return Path::stage;
  }
  const bool all_reduce = request_.collective == Collective::all_reduce;
  if (all_reduce && inputs_mapped && outputs_mapped &&
      (wanted == Path::automatic || wanted == Path::two_shot_push)) {
    return Path::two_shot_push;
  }
  if (all_reduce) {
    return Path::two_shot_stage;
  }
  if (inputs_mapped && outputs_mapped && has_root() && !reduces() && bytes_ >= kSharedBytes) {
    return Path::shared;
  }
  if (inputs_mapped) {
    return Path::pull;
  }
  if (outputs_mapped && !reduces()) {
    return Path::push;
  }
  return inputs_in_reach ? Path::read : Path::stage;
}

void CollectiveOperation::start_body() {
  path_ = choose_path();
  switch (path_) {
    case Path::alone:
      body_ = run_alone();
      break;
    case Path::barrier:
      body_ = run_barrier_over_link();
      break;
    case Path::two_shot_push:
      body_ = run_two_shot_push();
      break;
    case Path::pull:
      body_ = reduces() ? run_reducing_pull() : run_copies();
      break;
    case Path::push:
    case Path::shared:
      body_ = run_copies();
      break;
    case Path::read:
      body_ = run_read();
      break;
    case Path::two_shot_stage:
      body_ = run_two_shot_stage();
      break;
    case Path::moves:
      body_ = run_moves();
      break;
    default:
      body_ = run_stage();
  }
}

// This rank no longer accesses its peers' memory for the operation.
void CollectiveOperation::finish(bool ring) {
  fault::reach(fault::Point::exit, me(), number_);
  group_->finish_operation(number_);
  // A rank that only sends may be ahead: the others still read what it would take away from them.
  const bool fills_again = is_small_ && !is_tiny_ && publishes() && consumes();
  const size_t stage_bytes = fills_again ? bytes_ : 0;
  shared_->fetch_for_writing(number_ + 1, stage_bytes);
  if (ring) {
    group_->ring_others();
  }
}

// Everything was there when the last rank posted: no coroutine, no second wait. Nobody needs to
// be woken either when this is the only operation in flight: a peer that waits for our stage or
// slot is ahead of us and waits for our next post as well, which rings. Unless it only gives.
void CollectiveOperation::finish_at_entry() {
  path_ = is_small_ ? Path::stage : Path::barrier;
  fault::reach(fault::Point::middle, me(), number_);
  if (is_small_) {
    copy_own_piece();
    if (consumes()) {
      consume_stage(0, stage_quota());
    }
  }
  count_traffic(received_elements(request_, me(), world()) * element_,
                staged_elements(request_, me(), world()) * element_);
  finish(has_root() || others_in_flight());
}

void CollectiveOperation::count_traffic(size_t read, size_t written) {
  PathCounters& counters = shared_->counters(request_.collective, path_);
  const auto add = [](std::atomic<uint64_t>& counter,
                      uint64_t more) {  // one writer: the lock's holder
    counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  };
  add(counters.operations, 1);
  add(counters.bytes, bytes_);
  add(counters.peer_reads, read);
  add(counters.peer_writes, written);
}

ReduceSpec CollectiveOperation::reduce_spec(bool streaming) {
  ReduceSpec spec = reduction_over(world(), request_.op, request_.dtype);
  spec.streaming = streaming;
  if (request_.op == ReduceOp::premul_sum) {
    factors_.resize(world());
    for (int r = 0; r < world(); ++r) {
      factors_[r] = slot(r).prescale;
    }
    spec.pre = factors_.data();
  }
  return spec;
}

bool CollectiveOperation::relieve() {
  return path_ == Path::moves && shared_->transport().set_aside_unexpected();
}

void CollectiveOperation::retire() {
  if (group_->failed()) {
    shared_->transport().give_up();
  }
  if (body_.handle) {
    body_.handle.destroy();
    body_.handle = nullptr;
  }
  request_.program.reset();
}

}  // namespace dpcore
