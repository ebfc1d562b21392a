// Bodies for ordinary memory, which peers cannot see: it is copied into the owner's stage (a
// small part of its arena that stays in the cache), chunk by chunk, and reduced or copied out
// of there by each rank that needs it.
//
// A chunk is the part of the data that fits one of the stage's kStageBuffers buffers. Two
// counters of the slot keep the pipeline going:
//   filled    chunks that peers may read; a reader waits for it
//   consumed  chunks this rank has read from all ranks; a writer waits for it before it fills
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
#include <cstring>

#include "comm/base/error.h"
#include "comm/collective/path.h"
#include "comm/operations/path_run.h"

namespace dpcore {
namespace {

// Between the user's memory and a buffer of the own stage, all but the own slice, which never goes
// there. Its lines are this rank's since it collected the chunk before: the C library's copy, which
// asks for none ahead, is the fastest way in.
void copy_other_slices(PathRun& run, size_t chunk, size_t quota, bool into_stage) {
  const size_t count = in_chunk(run.request.count, chunk, quota);
  const ElementRange own = chunk_range(count, run.world(), run.me());
  const size_t offset = chunk * quota * run.element;
  std::byte* buffer = run.stage_of(run.me()) + two_shot_offset(chunk);
  for (const auto& [begin, end] : {ByteRange{0, own.begin * run.element},
                                   ByteRange{own.end * run.element, count * run.element}}) {
    if (into_stage) {
      std::memcpy(buffer + begin, run.request.input + offset + begin, end - begin);
    } else {
      copy_taking_over(run.request.output + offset + begin, buffer + begin, end - begin);
    }
  }
}

}  // namespace

void fill_stage(PathRun& run, size_t chunk, size_t quota) {
  const auto copy_for = [&](int reader, bool is_only_one) {
    const Piece piece = run.outgoing(reader);
    // The thread that runs on this processor next finds the data in its caches.
    const bool is_beside = is_only_one && !run.is_small &&
                           run.group->endpoint().takes_turns_with(run.group->member(reader));
    const auto copy = is_beside ? copy_bytes : copy_to_peers;
    copy(run.stage_buffer(run.me(), chunk, reader, quota),
         run.request.input + (piece.mine + chunk * quota) * run.element,
         in_chunk(piece.elements, chunk, quota) * run.element);
  };
  if (run.same_piece_for_all()) {
    const bool is_for_root = run.has_root() && !comes_from_root(run.request.collective);
    copy_for(is_for_root ? run.request.root : (run.me() + 1) % run.world(),
             is_for_root || run.world() == 2);
    return;
  }
  for (int to = 0; to < run.world(); ++to) {
    if (to != run.me()) {
      copy_for(to, true);
    }
  }
}

void consume_stage(PathRun& run, size_t chunk, size_t quota) {
  if (run.reduces()) {
    const Piece own = run.outgoing(run.me());
    const size_t count = in_chunk(run.incoming(run.me()).elements, chunk, quota);
    run.inputs.resize(run.world());
    for (int r = 0; r < run.world(); ++r) {
      run.inputs[r] = r == run.me()
                          ? static_cast<const void*>(run.request.input +
                                                     (own.mine + chunk * quota) * run.element)
                          : run.stage_buffer(r, chunk, run.me(), quota);
    }
    void* out = run.request.output + chunk * quota * run.element;
    reduce(run.reduce_spec(own.mine + chunk * quota), run.inputs, {&out, 1}, count);
    return;
  }
  for (int i = 1; i < run.world(); ++i) {
    const int from = (run.me() + i) % run.world();
    const Piece piece = run.incoming(from);
    const size_t count = in_chunk(piece.elements, chunk, quota);
    if (count > 0) {
      copy_from_peer(run.request.output + (piece.mine + chunk * quota) * run.element,
                     run.stage_buffer(from, chunk, run.me(), quota), count * run.element);
    }
  }
}

void check_part(const PathRun& run, int from, uint64_t sent) {
  if (sent != run.incoming(from).elements) {
    throw Mismatch(run.operation.describe() + ": rank " + std::to_string(from) + " sends " +
                   std::to_string(sent) + " elements to rank " + std::to_string(run.me()) +
                   ", which expects " + std::to_string(run.incoming(from).elements) +
                   "; input splits of one side must be the output splits of the other");
  }
}

// Uneven all_to_all: the stage begins with what its owner is about to send to each rank.
void check_announced_parts(const PathRun& run) {
  for (int r = 0; r < run.world(); ++r) {
    check_part(run, r, reinterpret_cast<const uint64_t*>(run.stage_of(r))[run.me()]);
  }
}

Steps run_stage(PathRun& run) {
  const size_t quota = run.stage_quota();
  if (quota == 0) {
    throw Unsupported(run.operation.describe() + ": ordinary memory of " +
                      std::to_string(run.world()) + " ranks does not fit into a stage");
  }
  size_t to_fill = 0;
  size_t to_read = 0;
  for (int r = 0; r < run.world(); ++r) {
    const bool peer = r != run.me();
    const size_t out = run.publishes() && run.consumes(r) && peer ? run.outgoing(r).elements : 0;
    const size_t in = run.consumes() && run.publishes(r) && peer ? run.incoming(r).elements : 0;
    to_fill = std::max(to_fill, chunks_of(out, quota));
    to_read = std::max(to_read, chunks_of(in, quota));
  }
  OperationSlot& slot = run.own_slot();
  size_t already_filled = 0;
  if (run.announces_parts) {  // then the first chunk is there already
    already_filled = run.publishes() ? 1 : 0;
    check_announced_parts(run);
  } else {
    co_await run.until_stage_is_free();
    run.take_stage();
  }
  if (to_read == 0) {
    slot.consumed.store(run.kNoMore, std::memory_order_release);
  }
  if (to_fill <= already_filled) {
    slot.filled.store(run.kNoMore, std::memory_order_release);
    run.group->ring_others();
  }
  copy_own_piece(run);
  const size_t rounds = std::max(to_fill, to_read);
  for (size_t k = 0; k <= rounds; ++k) {
    if (k < to_fill && k >= already_filled) {
      if (k >= kStageBuffers) {
        co_await run.until_all("a stage buffer to be read", &OperationSlot::consumed,
                               k - kStageBuffers + 1);
      }
      fill_stage(run, k, quota);
      slot.filled.store(k + 1 == to_fill ? run.kNoMore : k + 1, std::memory_order_release);
      run.group->ring_others();
    }
    if (k >= 1 && k <= to_read) {
      co_await run.until_all("a chunk of every rank", &OperationSlot::filled, k);
      consume_stage(run, k - 1, quota);
      slot.consumed.store(k == to_read ? run.kNoMore : k, std::memory_order_release);
      if (k < to_read) {  // after the last chunk finish() rings
        run.group->ring_others();
        co_await run.pause();
      }
    }
  }
  run.count_staged_traffic();
  run.finish();
}

Steps run_two_shot_stage(PathRun& run) {
  const size_t quota = two_shot_quota(run.bytes, run.element);
  const size_t chunks = chunks_of(run.request.count, quota);
  ReduceSpec spec = run.reduce_spec();
  spec.takes_over = true;
  OperationSlot& slot = run.own_slot();
  co_await run.until_stage_is_free();
  run.take_stage();
  run.inputs.resize(run.world());
  run.outputs.resize(run.world());
  size_t reduced = 0;
  for (size_t k = 0; k < chunks + 2; ++k) {
    if (k < chunks) {  // fill chunk k
      copy_other_slices(run, k, quota, true);
      slot.filled.store(k + 1, std::memory_order_release);
      run.group->ring_others();
    }
    if (k >= 1 && k - 1 < chunks) {  // reduce my slice of chunk k - 1
      const size_t chunk = k - 1;
      const ElementRange slice =
          chunk_range(in_chunk(run.request.count, chunk, quota), run.world(), run.me());
      co_await run.until_all("a chunk of every rank", &OperationSlot::filled, chunk + 1);
      const size_t in_buffer = two_shot_offset(chunk) + slice.begin * run.element;
      const size_t in_data = (chunk * quota + slice.begin) * run.element;
      for (int r = 0; r < run.world(); ++r) {
        run.inputs[r] = r == run.me() ? run.request.input + in_data : run.stage_of(r) + in_buffer;
        run.outputs[r] = r == run.me() ? run.request.output + in_data : run.stage_of(r) + in_buffer;
      }
      spec.check.first_element = chunk * quota + slice.begin;
      reduce(spec, run.inputs, run.outputs, slice.size());
      reduced += slice.size();
      slot.reduced.store(chunk + 1, std::memory_order_release);
      run.group->ring_others();
      co_await run.pause();
    }
    if (k >= 2) {  // collect the other slices of chunk k - 2
      const size_t chunk = k - 2;
      co_await run.until_all("a reduced slice of every rank", &OperationSlot::reduced, chunk + 1);
      copy_other_slices(run, chunk, quota, false);
      co_await run.pause();
    }
  }
  const size_t others = reduced * run.element * static_cast<size_t>(run.world() - 1);
  run.count_traffic(others, others);
  run.finish();
}

}  // namespace dpcore
