// Bodies for data that every rank can reach: no copy that the result does not need.
//
// Two-shot push (all_reduce). The buffer is cut into one slice per rank, as the schedule
// "two_shot" cuts it. Both of its steps are one pass: the owner of a slice reads it from all
// inputs in rank order and writes the result to all outputs. In place this is safe because a
// slice is read and written by its owner only; it needs a wait at entry (everybody's data is
// there) and one at exit (every slice is written), and moves 2*S bytes per rank.
//
// Pull (schedule "direct"): whoever needs data reads it from the inputs of its peers.
// Push (schedule "direct"): whoever has data writes it to the outputs of its peers.
// Shared (schedule "direct", rooted): both. The root copies the first N-th of every piece and the
// other side the rest, so that all are equally busy; pulling alone would leave the root idle.
// All wait at exit until nobody touches this rank's buffers any more.
#include <algorithm>
#include <cstring>

#include "comm/operations/collective_operation.h"
#include "comm/schedule/schedule.h"

namespace dpcore {

CollectiveOperation::Steps CollectiveOperation::run_alone() {
  if (reduces()) {
    const void* in = request_.input;
    void* out = request_.output;
    reduce(reduce_spec(false), {&in, 1}, {&out, 1}, incoming(0).elements);
  } else if (request_.input != request_.output && request_.input != nullptr) {
    const Piece own = incoming(0);
    std::memmove(request_.output, request_.input, own.elements * element_);
  }
  count_traffic(0, 0);
  finish();
  co_return;
}

CollectiveOperation::Steps CollectiveOperation::run_two_shot_push() {
  inputs_.resize(world());
  outputs_.resize(world());
  const bool in_place = request_.input == request_.output;
  ReduceSpec spec = reduce_spec(!in_place && bytes_ >= kStreamingBytes);
  spec.takes_over = in_place;
  const ElementRange slice = chunk_range(request_.count, world(), me());
  const size_t segment = std::max<size_t>(1, kSegmentBytes / element_);
  for (size_t begin = slice.begin; begin < slice.end; begin += segment) {
    const size_t count = std::min(segment, slice.end - begin);
    for (int r = 0; r < world(); ++r) {
      inputs_[r] = input_of(r) + begin * element_;
      outputs_[r] = output_of(r) + begin * element_;
    }
    reduce(spec, inputs_, outputs_, count);
    co_await pause();
  }
  const size_t others = slice.size() * element_ * static_cast<size_t>(world() - 1);
  count_traffic(others, others);
  finish();
  co_await until_all("every slice to be written", &OperationSlot::finished, number_ + 1);
}

CollectiveOperation::Steps CollectiveOperation::run_reducing_pull() {
  size_t read = 0;
  if (consumes()) {
    inputs_.resize(world());
    const size_t total = incoming(me()).elements;
    const ReduceSpec spec = reduce_spec(total * element_ >= kStreamingBytes);
    const size_t segment = std::max<size_t>(1, kSegmentBytes / element_);
    for (size_t begin = 0; begin < total; begin += segment) {
      const size_t count = std::min(segment, total - begin);
      for (int r = 0; r < world(); ++r) {  // own data may lie anywhere
        const std::byte* input = r == me() ? request_.input : input_of(r);
        inputs_[r] = input + (incoming(r).theirs + begin) * element_;
      }
      void* out = request_.output + begin * element_;
      reduce(spec, inputs_, {&out, 1}, count);
      co_await pause();
    }
    read = total * element_ * static_cast<size_t>(world() - 1);
  }
  count_traffic(read, 0);
  finish();
  if (publishes()) {
    co_await until_all("every rank to have read", &OperationSlot::finished, number_ + 1);
  }
}

// The bytes of a piece that this rank copies, as its giver or as its taker.
CollectiveOperation::ByteRange CollectiveOperation::own_share(size_t bytes, bool giving) const {
  if (path_ == Path::shared) {
    const size_t cut = bytes / static_cast<size_t>(world()) / 64 * 64;
    return me() == request_.root ? ByteRange{0, cut} : ByteRange{cut, bytes};
  }
  return giving == (path_ == Path::push) ? ByteRange{0, bytes} : ByteRange{};
}

// The part of the data that does not travel: own input to own output.
void CollectiveOperation::copy_own_piece() {
  if (!keeps_a_piece(request_, me())) {
    return;
  }
  const std::byte* from = request_.input + outgoing(me()).mine * element_;
  std::byte* to = request_.output + incoming(me()).mine * element_;
  if (from != to) {
    const size_t bytes = incoming(me()).elements * element_;
    copy_bytes(to, from, bytes, bytes >= kStreamingBytes);
  }
}

CollectiveOperation::Steps CollectiveOperation::run_copies() {
  size_t copied[2] = {0, 0};  // taken, given
  copy_own_piece();
  for (int i = 1; i < world(); ++i) {
    const int peer = (me() + i) % world();  // not everybody at the same peer at once
    for (const bool giving : {false, true}) {
      if (giving ? !publishes() : !consumes()) {
        continue;
      }
      const Piece piece = giving ? outgoing(peer) : incoming(peer);
      const ByteRange share = own_share(piece.elements * element_, giving);
      if (share.begin == share.end) {
        continue;
      }
      const std::byte* from = giving ? request_.input + piece.mine * element_
                                     : input_of(peer) + piece.theirs * element_;
      std::byte* to = giving ? output_of(peer) + piece.theirs * element_
                             : request_.output + piece.mine * element_;
      for (size_t at = share.begin; at < share.end; at += kSegmentBytes) {
        copy_bytes(to + at, from + at, std::min(kSegmentBytes, share.end - at),
                   bytes_ >= kStreamingBytes);
        co_await pause();
      }
      copied[giving ? 1 : 0] += share.end - share.begin;
    }
  }
  count_traffic(copied[0], copied[1]);
  finish();
  const bool is_read = path_ != Path::push && publishes();
  const bool is_written = path_ != Path::pull && consumes();
  if (is_read || is_written) {
    co_await until_all(is_read ? "every rank to have read" : "every piece to be written",
                       &OperationSlot::finished, number_ + 1);
  }
}

}  // namespace dpcore
