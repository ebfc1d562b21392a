// The body for ordinary memory that is only copied and that peers may read: each taker copies what
// it needs out of its owner's memory (memory/peer_memory.h). Schedule "direct", one copy, where the
// stage takes two.
//
// What waits for what: a taker for no other rank once all have entered; an owner until all takers
// have finished, since its memory goes back to the program then. An owner that gives up goes back
// at once: its failure is published before that, so a taker that finds none after its last byte has
// read what was meant, and one that finds a failure, or no owner any more, never finishes. It still
// needs that owner, though the owner has finished its own part, so the engine's next look fails the
// operation, as any other that waits for a rank that is gone.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "comm/base/error.h"
#include "comm/memory/peer_memory.h"
#include "comm/operations/path_run.h"

namespace dpcore {
namespace {

// Each call of the kernel costs 1.5 us beside its copy, so where no other operation waits there are
// fewer.
constexpr size_t kReadAlone = size_t{1} << 20;

}  // namespace

Steps run_read(PathRun& run) {
  size_t read = 0;
  copy_own_piece(run);
  for (int i = 1; i < run.world() && run.consumes(); ++i) {
    const int owner = (run.me() + i) % run.world();  // not all ranks at the same one at once
    const Piece piece = run.incoming(owner);
    const size_t offset = piece.theirs * run.element;
    const size_t bytes = piece.elements * run.element;
    std::byte* to = run.request.output + piece.mine * run.element;
    const bool is_mapped = run.slot(owner).input_offset != Arena::kNowhere;
    const ReadableProcess& process = run.group->endpoint().readable(run.group->member(owner));
    int problem = 0;
    for (size_t at = 0, segment = 0; at < bytes && problem == 0; at += segment) {
      segment = std::min(run.others_in_flight() ? run.kSegmentBytes : kReadAlone, bytes - at);
      if (is_mapped) {
        copy_bytes(to + at, run.input_of(owner) + offset + at, segment);
      } else {
        problem =
            read_memory_of(process, to + at, run.slot(owner).input_address + offset + at, segment);
      }
      co_await run.pause();
    }
    const bool counts = bytes == 0 || run.keeps_its_input(owner);
    if (problem != 0 && problem != ESRCH && counts) {
      throw Error(
          "the memory of rank " + std::to_string(owner) +
          " cannot be read: " + std::strerror(problem) +
          ". Keep tensors until the call is over, or set DPCORE_READ_PEERS=0, and all ranks "
          "copy through shared memory instead");
    }
    if (problem != 0 || !counts) {
      run.await_end_of(owner);
      co_await PathRun::Until{run};
    }
    read += bytes;
  }
  run.count_traffic(read, 0);
  run.finish();
  if (run.publishes()) {
    co_await run.until_finished("every rank to have read");
  }
}

}  // namespace dpcore
