// Bodies for data that every rank can reach: no copy that the result does not need.
//
// Two-shot push (all_reduce). The buffer is cut into one slice per rank, as the schedule
// "two_shot" cuts it. Both of its steps are one pass: the owner of a slice reads it from all
// inputs in rank order and writes the result to all outputs. In place this is safe because a
// slice is read and written by its owner only; it needs a wait at entry (every rank's data is
// there) and one at exit (every slice is written), and moves 2*S bytes per rank.
//
// Pull (schedule "direct"): a rank that needs data reads it from the inputs of its peers.
// Push (schedule "direct"): a rank that has data writes it to the outputs of its peers.
// Shared (schedule "direct", rooted): both. The root copies the first N-th of every piece and the
// other side the rest, so that all are equally busy; pulling alone would leave the root idle.
// All wait at exit until no peer touches this rank's buffers any more.
#include <algorithm>
#include <cstring>

#include "comm/collective/path.h"
#include "comm/operations/path_run.h"

namespace dpcore {

Steps run_alone(PathRun& run) {
  check_part(run, 0, run.outgoing(0).elements);
  if (run.reduces()) {
    const void* in = run.request.input;
    void* out = run.request.output;
    reduce(run.reduce_spec(), {&in, 1}, {&out, 1}, run.incoming(0).elements);
  } else if (run.request.input != run.request.output && run.request.input != nullptr) {
    const Piece own = run.incoming(0);
    std::memmove(run.request.output, run.request.input, own.elements * run.element);
  }
  run.count_traffic(0, 0);
  run.finish();
  co_return;
}

Steps run_two_shot_push(PathRun& run) {
  run.inputs.resize(run.world());
  run.outputs.resize(run.world());
  const bool in_place = run.request.input == run.request.output;
  ReduceSpec spec = run.reduce_spec();
  spec.takes_over = in_place;
  const ElementRange slice = chunk_range(run.request.count, run.world(), run.me());
  const size_t segment = std::max<size_t>(1, run.kSegmentBytes / run.element);
  for (size_t begin = slice.begin; begin < slice.end; begin += segment) {
    const size_t count = std::min(segment, slice.end - begin);
    for (int r = 0; r < run.world(); ++r) {
      run.inputs[r] = run.input_of(r) + begin * run.element;
      run.outputs[r] = run.output_of(r) + begin * run.element;
    }
    spec.check.first_element = begin;
    reduce(spec, run.inputs, run.outputs, count);
    co_await run.pause();
  }
  const size_t others = slice.size() * run.element * static_cast<size_t>(run.world() - 1);
  run.count_traffic(others, others);
  run.finish();
  co_await run.until_finished("every slice to be written");
  run.learn_not_finite();
}

Steps run_reducing_pull(PathRun& run) {
  size_t read = 0;
  if (run.consumes()) {
    run.inputs.resize(run.world());
    const size_t total = run.incoming(run.me()).elements;
    ReduceSpec spec = run.reduce_spec();
    const size_t segment = std::max<size_t>(1, run.kSegmentBytes / run.element);
    for (size_t begin = 0; begin < total; begin += segment) {
      const size_t count = std::min(segment, total - begin);
      for (int r = 0; r < run.world(); ++r) {  // own data may lie anywhere
        const std::byte* input = r == run.me() ? run.request.input : run.input_of(r);
        run.inputs[r] = input + (run.incoming(r).theirs + begin) * run.element;
      }
      void* out = run.request.output + begin * run.element;
      spec.check.first_element = run.incoming(run.me()).theirs + begin;
      reduce(spec, run.inputs, {&out, 1}, count);
      co_await run.pause();
    }
    read = total * run.element * static_cast<size_t>(run.world() - 1);
  }
  if (const int owner = run.publishes() ? -1 : run.owner_that_gave_up(); owner >= 0) {
    run.await_end_of(owner);
    co_await PathRun::Until{run};
  }
  run.count_traffic(read, 0);
  run.finish();
  if (run.publishes()) {
    co_await run.until_finished("every rank to have read");
    run.learn_not_finite();
  }
}

void copy_own_piece(PathRun& run) {
  if (!keeps_a_piece(run.request, run.me())) {
    return;
  }
  const std::byte* from = run.request.input + run.outgoing(run.me()).mine * run.element;
  std::byte* to = run.request.output + run.incoming(run.me()).mine * run.element;
  if (from != to) {
    copy_bytes(to, from, run.incoming(run.me()).elements * run.element);
  }
}

Steps run_copies(PathRun& run) {
  size_t copied[2] = {0, 0};  // taken, given
  copy_own_piece(run);
  for (int i = 1; i < run.world(); ++i) {
    const int peer = (run.me() + i) % run.world();  // not all ranks at the same peer at once
    for (const bool giving : {false, true}) {
      if (giving ? !run.publishes() : !run.consumes()) {
        continue;
      }
      const Piece piece = giving ? run.outgoing(peer) : run.incoming(peer);
      const ByteRange share = own_share(run.request, run.path, run.me(), run.world(),
                                        piece.elements * run.element, giving);
      if (share.begin == share.end) {
        continue;
      }
      const std::byte* from = giving ? run.request.input + piece.mine * run.element
                                     : run.input_of(peer) + piece.theirs * run.element;
      std::byte* to = giving ? run.output_of(peer) + piece.theirs * run.element
                             : run.request.output + piece.mine * run.element;
      for (size_t at = share.begin; at < share.end; at += run.kSegmentBytes) {
        copy_bytes(to + at, from + at, std::min(run.kSegmentBytes, share.end - at));
        co_await run.pause();
      }
      copied[giving ? 1 : 0] += share.end - share.begin;
    }
  }
  const bool is_read = run.path != Path::push && run.publishes();
  const bool is_written = run.path != Path::pull && run.consumes();
  if (const int owner = is_read || is_written ? -1 : run.owner_that_gave_up(); owner >= 0) {
    run.await_end_of(owner);
    co_await PathRun::Until{run};
  }
  run.count_traffic(copied[0], copied[1]);
  run.finish();
  if (is_read || is_written) {
    co_await run.until_finished(is_read ? "every rank to have read" : "every piece to be written");
  }
}

}  // namespace dpcore
