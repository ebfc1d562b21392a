// How the ranks of a communicator that failed agree on who goes on: one pure function.
//
// Every rank has a ballot that all others read, at once in memory and a little later over TCP. What
// a rank does next follows from its own ballot, those that it sees of the others, who has died,
// and how long it has waited. Nothing is done here: the caller publishes, meets and sleeps.
//
//   1. A rank that has no operation in flight any more says that it is here, in a round.
//   2. The lowest rank that lives waits for all that may come, and proposes those that came.
//   3. They meet anew, as in init(): that succeeds on all of them, or is tried in another round.
//   4. A rank that has met says so, and returns its communicator when all its members have.
//
// Whatever dies, stops or is cut off at any line of this, two things hold. A communicator needs all
// its members for every collective, and a rank takes part in one at a time, so two communicators
// can only make progress side by side if they have no rank in common. And there are none such: a
// proposal takes in more than half of the ranks of the first communicator that are not known to be
// dead, or half of them with the lowest one (may_go_on). A rank that returned its communicator
// while another one, because of a death, did not, finds that death in its first operation, and
// comes to a later round of the same agreement.
//
// Ranks that join (grow(), which is the same with guests) have no ballot. A communicator with
// guests begins a line of its own, whose members agree elsewhere from then on. So a rank that has
// met it and gave it up, because of a death, follows one that went on with it, and meets no others
// as long as one lives that may have gone on.
//
// A rank that is out stays out: others went on without it, and its bound says so on all of them.
#pragma once

#include <vector>

#include "comm/memory/ballot.h"

namespace dpcore {

struct BallotView {
  std::vector<Ballot> ballots;  // by rank of the first communicator, the own one included
  RankSet dead;                 // known to be
  RankSet away;                 // will not come, but may live: left in order, or out of reach
  // The meeting with guests in which this rank has met all its members, if there was one.
  uint32_t held_round = 0;
  int held_proposer = -1;
  int lapses = 0;  // how often the patience has run out since the own round or state began
};

enum class StepKind {
  wait,
  say,      // publish `ballot`, and ask again
  meet,     // the members of the ballot of `rank`; then say met() of it
  go_on,    // publish `ballot` and return what was met
  out,      // `rank` went on with others
  too_few,  // in reach, of those that may live
};

struct NextStep {
  StepKind kind = StepKind::wait;
  Ballot ballot = {};
  int rank = -1;
};

// To be followed by publishing the ballot: the rank is here, after all rounds that it has seen.
Ballot arrive(const Ballot& before, int rank, const BallotView& seen);
// What the rank says when a meeting failed.
Ballot another_round(const Ballot& own);
// What the rank says once it has met the members of a proposal.
Ballot met(const Ballot& own, const Ballot& proposal);
NextStep next_step(int rank, const BallotView& seen);

// Whether ranks that are together may go on, where `living` are not known to be dead.
bool may_go_on(const RankSet& together, const RankSet& living);

}  // namespace dpcore
