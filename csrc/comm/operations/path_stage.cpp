// Bodies for ordinary memory, which peers cannot see: it is copied into the owner's stage (a
// small part of its arena that stays in the cache), chunk by chunk, and reduced or copied out
// of there by whoever needs it.
//
// A chunk is the part of the data that fits one of the stage's kStageBuffers buffers. Two
// counters of the slot keep the pipeline going:
//   filled    chunks that peers may read; a reader waits for it
//   consumed  chunks this rank has read from everybody; a writer waits for it before it fills
//             a buffer again
// A rank that has no (more) chunks to fill or to read sets its counter to the maximum. Filling
// runs one chunk ahead of reading, so a rank is always busy while its peers catch up.
//
// One-shot (all_reduce, reduce) and direct (the others): every reader takes what it needs from
// all stages. Own data is read where it is.
// Two-shot (all_reduce that is not small): of each chunk a rank reduces one slice, where it lies in
// the stages of the others and into them (counter `reduced`), and then collects the other slices
// from its own stage. A line of a stage so goes to another processor and comes back, both times
// asked for with the right to write it; in stages for inputs and others for results it would go
// as often, and every write would have to ask for the right first. The time of an all-reduce of
// 4 MiB is the time that lines are on their way: asking ahead for all of them halves it.
#include <algorithm>

#include "comm/base/error.h"
#include "comm/operations/collective_operation.h"
#include "comm/schedule/schedule.h"

namespace dpcore {
namespace {

constexpr size_t kAnnouncedBytes = 4096;
constexpr size_t kFinestChunk = 32768;       // a small operation is one chunk
constexpr size_t kChunksAtLeast = 32;        // filling and reading overlap
constexpr size_t kTwoShotChunksAtLeast = 8;  // each has two waits

size_t chunks_of(size_t elements, size_t quota) { return (elements + quota - 1) / quota; }

size_t in_chunk(size_t elements, size_t chunk, size_t quota) {
  const size_t begin = chunk * quota;
  return begin >= elements ? 0 : std::min(quota, elements - begin);
}

}  // namespace

// Elements of one piece that go into one chunk. Few bytes are cut finer, so that readers begin
// early. All ranks cut alike: what they announce to each other they don't know beforehand.
size_t CollectiveOperation::stage_quota() const {
  if (is_small_ && request_.input_parts.empty()) {
    return request_.count;  // one chunk; a division is a good part of what a small one costs
  }
  const size_t room = kStageBytes - (announces_parts_ ? kAnnouncedBytes : 0);
  const size_t pieces = same_piece_for_all() ? 1 : static_cast<size_t>(world());
  const size_t largest = room / SharedState::kStageBuffers;
  const size_t wanted = std::max(kFinestChunk, bytes_ / kChunksAtLeast);
  return (announces_parts_ ? largest : std::min(largest, wanted)) / pieces / 64 * 64 / element_;
}

size_t CollectiveOperation::two_shot_quota() const {
  constexpr size_t kLargest = kStageBytes / SharedState::kStageBuffers;
  return std::clamp(bytes_ / kTwoShotChunksAtLeast, kFinestChunk, kLargest) / 64 * 64 / element_;
}

std::byte* CollectiveOperation::stage_buffer(int r, size_t chunk, int piece, size_t quota) const {
  if (is_tiny_) {
    const size_t piece_bytes = same_piece_for_all() ? 0 : request_.count * element_;
    return slot(r).tiny + static_cast<size_t>(piece) * piece_bytes;
  }
  const size_t pieces = same_piece_for_all() ? 1 : static_cast<size_t>(world());
  const size_t piece_bytes = (quota * element_ + 63) / 64 * 64;
  const size_t buffer = (chunk % SharedState::kStageBuffers) * pieces * piece_bytes;
  return stage_of(r) + (announces_parts_ ? kAnnouncedBytes : 0) + buffer +
         (same_piece_for_all() ? 0 : static_cast<size_t>(piece) * piece_bytes);
}

void CollectiveOperation::fill_stage(size_t chunk, size_t quota) {
  if (same_piece_for_all()) {
    const int reader =
        request_.collective == Collective::reduce || request_.collective == Collective::gather
            ? request_.root
            : (me() + 1) % world();
    const Piece piece = outgoing(reader);
    copy_bytes(stage_buffer(me(), chunk, 0, quota),
               request_.input + (piece.mine + chunk * quota) * element_,
               in_chunk(piece.elements, chunk, quota) * element_);
    return;
  }
  for (int to = 0; to < world(); ++to) {
    const Piece piece = outgoing(to);
    const size_t count = in_chunk(piece.elements, chunk, quota);
    if (to != me() && count > 0) {
      copy_bytes(stage_buffer(me(), chunk, to, quota),
                 request_.input + (piece.mine + chunk * quota) * element_, count * element_);
    }
  }
}

void CollectiveOperation::consume_stage(size_t chunk, size_t quota) {
  if (reduces()) {
    const Piece own = outgoing(me());
    const size_t count = in_chunk(incoming(me()).elements, chunk, quota);
    inputs_.resize(world());
    for (int r = 0; r < world(); ++r) {
      inputs_[r] =
          r == me()
              ? static_cast<const void*>(request_.input + (own.mine + chunk * quota) * element_)
              : stage_buffer(r, chunk, me(), quota);
    }
    void* out = request_.output + chunk * quota * element_;
    const bool in_place = out == inputs_[me()];
    reduce(reduce_spec(!in_place && bytes_ >= kStreamingBytes), inputs_, {&out, 1}, count);
    return;
  }
  for (int i = 1; i < world(); ++i) {
    const int from = (me() + i) % world();
    const Piece piece = incoming(from);
    const size_t count = in_chunk(piece.elements, chunk, quota);
    if (count > 0) {
      copy_bytes(request_.output + (piece.mine + chunk * quota) * element_,
                 stage_buffer(from, chunk, me(), quota), count * element_,
                 bytes_ >= kStreamingBytes);
    }
  }
}

// Uneven all_to_all: the stage begins with what its owner is about to send to each rank.
void CollectiveOperation::check_announced_parts() const {
  for (int r = 0; r < world(); ++r) {
    const auto* announced = reinterpret_cast<const uint64_t*>(stage_of(r));
    if (announced[me()] != incoming(r).elements) {
      throw Mismatch(describe() + ": rank " + std::to_string(r) + " sends " +
                     std::to_string(announced[me()]) + " elements to rank " + std::to_string(me()) +
                     ", which expects " + std::to_string(incoming(r).elements) +
                     "; input splits of one side must be the output splits of the other");
    }
  }
}

CollectiveOperation::Steps CollectiveOperation::run_stage() {
  const size_t quota = stage_quota();
  size_t to_fill = 0;
  size_t to_read = 0;
  for (int r = 0; r < world(); ++r) {
    const bool peer = r != me();
    const size_t out = publishes() && consumes(r) && peer ? outgoing(r).elements : 0;
    const size_t in = consumes() && publishes(r) && peer ? incoming(r).elements : 0;
    to_fill = std::max(to_fill, chunks_of(out, quota));
    to_read = std::max(to_read, chunks_of(in, quota));
  }
  OperationSlot& slot = own_slot();
  size_t already_filled = 0;
  if (announces_parts_) {  // then the first chunk is there already
    already_filled = publishes() ? 1 : 0;
    check_announced_parts();
  } else {
    await_stage();
    co_await Until{*this};
    std::byte* stage = shared_->stage(number_);
    slot.stage_offset = group_->endpoint().arena().offset_of(stage, kStageBytes);
  }
  if (to_read == 0) {
    slot.consumed.store(kNoMore, std::memory_order_release);
  }
  if (to_fill <= already_filled) {
    slot.filled.store(kNoMore, std::memory_order_release);
    group_->ring_others();
  }
  copy_own_piece();
  const size_t rounds = std::max(to_fill, to_read);
  for (size_t k = 0; k <= rounds; ++k) {
    if (k < to_fill && k >= already_filled) {
      if (k >= SharedState::kStageBuffers) {
        co_await until_all("a stage buffer to be read", &OperationSlot::consumed,
                           k - SharedState::kStageBuffers + 1);
      }
      fill_stage(k, quota);
      slot.filled.store(k + 1 == to_fill ? kNoMore : k + 1, std::memory_order_release);
      group_->ring_others();
    }
    if (k >= 1 && k <= to_read) {
      co_await until_all("a chunk of every rank", &OperationSlot::filled, k);
      consume_stage(k - 1, quota);
      slot.consumed.store(k == to_read ? kNoMore : k, std::memory_order_release);
      if (k < to_read) {  // after the last chunk finish() rings
        group_->ring_others();
        co_await pause();
      }
    }
  }
  count_traffic(received_elements(request_, me(), world()) * element_,
                staged_elements(request_, me(), world()) * element_);
  finish();
}

CollectiveOperation::Steps CollectiveOperation::run_two_shot_stage() {
  const size_t quota = two_shot_quota();
  const size_t buffer_bytes = kStageBytes / SharedState::kStageBuffers;
  const size_t chunks = chunks_of(request_.count, quota);
  ReduceSpec spec = reduce_spec(false);
  spec.takes_over = true;
  OperationSlot& slot = own_slot();
  await_stage();
  co_await Until{*this};
  slot.stage_offset = group_->endpoint().arena().offset_of(shared_->stage(number_), kStageBytes);
  inputs_.resize(world());
  outputs_.resize(world());
  size_t reduced = 0;
  for (size_t k = 0; k < chunks + 2; ++k) {
    if (k < chunks) {  // fill chunk k
      copy_other_slices(k, quota, stage_of(me()) + k % SharedState::kStageBuffers * buffer_bytes,
                        true);
      slot.filled.store(k + 1, std::memory_order_release);
      group_->ring_others();
    }
    if (k >= 1 && k - 1 < chunks) {  // reduce my slice of chunk k - 1
      const size_t chunk = k - 1;
      const ElementRange slice = chunk_range(in_chunk(request_.count, chunk, quota), world(), me());
      co_await until_all("a chunk of every rank", &OperationSlot::filled, chunk + 1);
      const size_t in_buffer =
          chunk % SharedState::kStageBuffers * buffer_bytes + slice.begin * element_;
      const size_t in_data = (chunk * quota + slice.begin) * element_;
      for (int r = 0; r < world(); ++r) {
        inputs_[r] = r == me() ? request_.input + in_data : stage_of(r) + in_buffer;
        outputs_[r] = r == me() ? request_.output + in_data : stage_of(r) + in_buffer;
      }
      reduce(spec, inputs_, outputs_, slice.size());
      reduced += slice.size();
      slot.reduced.store(chunk + 1, std::memory_order_release);
      group_->ring_others();
      co_await pause();
    }
    if (k >= 2) {  // collect the other slices of chunk k - 2
      const size_t chunk = k - 2;
      co_await until_all("a reduced slice of every rank", &OperationSlot::reduced, chunk + 1);
      copy_other_slices(chunk, quota,
                        stage_of(me()) + chunk % SharedState::kStageBuffers * buffer_bytes, false);
      co_await pause();
    }
  }
  const size_t others = reduced * element_ * static_cast<size_t>(world() - 1);
  count_traffic(others, others);
  finish();
}

// Between the user's memory and a buffer of the own stage, all but the own slice, which never goes
// there.
void CollectiveOperation::copy_other_slices(size_t chunk, size_t quota, std::byte* buffer,
                                            bool into_stage) {
  const size_t count = in_chunk(request_.count, chunk, quota);
  const ElementRange own = chunk_range(count, world(), me());
  const size_t offset = chunk * quota * element_;
  for (const auto& [begin, end] :
       {ByteRange{0, own.begin * element_}, ByteRange{own.end * element_, count * element_}}) {
    if (into_stage) {
      copy_bytes(buffer + begin, request_.input + offset + begin, end - begin);
    } else {
      copy_taking_over(request_.output + offset + begin, buffer + begin, end - begin);
    }
  }
}

}  // namespace dpcore
