// The paths of a collective. collective/path_choice.h says when which one is taken.
#pragma once

#include "comm/operations/path_run.h"

namespace dpcore {

using Steps = PathRun::Steps;

// path_mapped.cpp: data that every rank can reach
Steps run_alone(PathRun& run);
Steps run_two_shot_push(PathRun& run);
Steps run_reducing_pull(PathRun& run);
Steps run_copies(PathRun& run);  // pull, push, shared
// path_read.cpp, path_stage.cpp: ordinary memory
Steps run_read(PathRun& run);
Steps run_stage(PathRun& run);
Steps run_two_shot_stage(PathRun& run);
// path_moves.cpp
Steps run_moves(PathRun& run);
Steps run_barrier_over_link(PathRun& run);

// What several of them do, and small operations without any of them.

// The part of the data that does not travel: own input to own output.
void copy_own_piece(PathRun& run);
// One chunk into the own stage, and out of the stages of the others.
void fill_stage(PathRun& run, size_t chunk, size_t quota);
void consume_stage(PathRun& run, size_t chunk, size_t quota);
// Throws Mismatch when what the others announced at the front of their stages is not what this rank
// expects.
void check_announced_parts(const PathRun& run);
// `is_prefilled`: the stage has something for them.
void tell_remote_members(const PathRun& run, bool is_prefilled);

}  // namespace dpcore
