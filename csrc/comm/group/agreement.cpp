// The rules of agreement.h, in the order in which a rank asks itself.
#include "comm/group/agreement.h"

#include <algorithm>

namespace dpcore {
namespace {

Ballot here_in(uint32_t round, Ballot ballot) {
  ballot.round = round;
  ballot.state = BallotState::here;
  ballot.proposer = -1;
  ballot.members = {};
  ballot.guests = 0;
  return ballot;
}

class Rules {
 public:
  Rules(int rank, const BallotView& seen) : rank_(rank), seen_(seen), own_(ballot(rank)) {
    allowed_ = RankSet::first(world());
    for (int r = 0; r < world(); ++r) {
      if (ballot(r).state != BallotState::silent) {
        allowed_.keep(ballot(r).bound);
      }
    }
  }

  NextStep next() const {
    if (const int r = rank_to_follow(); r >= 0) {
      return {StepKind::go_on, gone_on(ballot(r))};
    }
    if (!allowed_.has(rank_)) {
      return {StepKind::out, {}, rank_that_excludes_this_one()};
    }
    return own_.state == BallotState::met ? after_meeting() : before_meeting();
  }

 private:
  int world() const { return static_cast<int>(seen_.ballots.size()); }
  const Ballot& ballot(int r) const { return seen_.ballots[static_cast<size_t>(r)]; }
  bool is_gone(int r) const { return r != rank_ && (seen_.dead.has(r) || seen_.away.has(r)); }
  bool is_here(int r) const {
    return !is_gone(r) && ballot(r).round == own_.round && ballot(r).state == BallotState::here;
  }
  // Whether r has met, in this round, what this proposer proposed.
  bool has_met(int r, int proposer) const {
    const Ballot& its = ballot(r);
    return its.round == own_.round && its.proposer == proposer && its.state >= BallotState::met;
  }
  // Whether r can't meet any more what this proposer proposed in this round.
  bool is_lost_for(int r, int proposer) const {
    const Ballot& its = ballot(r);
    return is_gone(r) || its.round > own_.round ||
           (its.round == own_.round && its.state >= BallotState::met && its.proposer != proposer);
  }
  template <class Is>
  bool any_member(const RankSet& members, Is&& is) const {
    for (int r = 0; r < world(); ++r) {
      if (r != rank_ && members.has(r) && is(r)) {
        return true;
      }
    }
    return false;
  }

  int rank_that_excludes_this_one() const {
    for (int r = 0; r < world(); ++r) {
      if (ballot(r).state != BallotState::silent && !ballot(r).bound.has(rank_)) {
        return r;
      }
    }
    return -1;
  }

  // One that went on with guests, and with this rank, which holds that communicator. A rank that
  // has met others since may have let them go on already: those that went on with guests are dead.
  int rank_to_follow() const {
    if (own_.state == BallotState::met && own_.round > seen_.held_round) {
      return -1;
    }
    for (int r = 0; r < world(); ++r) {
      const Ballot& its = ballot(r);
      if (r != rank_ && its.state == BallotState::went_on && its.guests > 0 &&
          its.round == seen_.held_round && its.proposer == seen_.held_proposer) {
        return r;
      }
    }
    return -1;
  }

  Ballot gone_on(const Ballot& with) const {
    Ballot ballot = own_;
    ballot.round = with.round;
    ballot.proposer = with.proposer;
    ballot.members = with.members;
    ballot.guests = with.guests;
    ballot.state = BallotState::went_on;
    ballot.bound = with.members;
    return ballot;
  }

  NextStep say_here(uint32_t round) const { return {StepKind::say, here_in(round, own_)}; }

  // Of a round that is over, and the ranks that are further still say which is next.
  NextStep try_again(const RankSet& members) const {
    uint32_t round = own_.round + 1;
    for (int r = 0; r < world(); ++r) {
      if (members.has(r) && !is_gone(r)) {
        round = std::max(round, ballot(r).round);
      }
    }
    return say_here(round);
  }

  NextStep after_meeting() const {
    const int proposer = own_.proposer;
    const RankSet& members = own_.members;
    if (seen_.lapses > 0 || any_member(members, [&](int r) { return is_lost_for(r, proposer); })) {
      return try_again(members);
    }
    if (any_member(members, [&](int r) { return !has_met(r, proposer); })) {
      return {};
    }
    return {StepKind::go_on, gone_on(own_)};
  }

  NextStep before_meeting() const {
    uint32_t newest = own_.round;
    for (int r = 0; r < world(); ++r) {
      const BallotState state = ballot(r).state;
      if (allowed_.has(r) && !is_gone(r) &&
          (state == BallotState::here || state == BallotState::met)) {
        newest = std::max(newest, ballot(r).round);
      }
    }
    if (newest > own_.round) {
      return say_here(newest);
    }
    // A rank proposes beside a lower one only when it has given that one up, so it is the later
    // proposal that has the wider view.
    for (int r = world() - 1; r >= 0; --r) {
      const Ballot& its = ballot(r);
      if (its.proposer == r && its.round == own_.round && !is_gone(r)) {
        return answer(r);
      }
    }
    return propose();
  }

  NextStep answer(int proposer) const {
    const RankSet& members = ballot(proposer).members;
    if (!members.has(rank_)) {  // it takes this rank for gone: it goes on without, or tries again
      return own_.proposer == rank_ ? say_here(own_.round) : NextStep{};
    }
    if (any_member(members, [&](int r) { return is_lost_for(r, proposer); })) {
      return try_again(members);
    }
    return {StepKind::meet, {}, proposer};
  }

  NextStep propose() const {
    RankSet together;
    bool is_any_missing = false;
    std::vector<int> lower;  // which should propose
    for (int r = 0; r < world(); ++r) {
      if (r == rank_ || (allowed_.has(r) && is_here(r))) {
        together.add(r);
        if (r < rank_) {
          lower.push_back(r);
        }
      } else if (allowed_.has(r) && !is_gone(r)) {
        is_any_missing = true;
      }
    }
    // The first lapse gives up those that have not come, each later one the lowest that came and
    // proposes nothing.
    const auto given_up = static_cast<size_t>(std::max(0, seen_.lapses - 1));
    if (given_up < lower.size() || (is_any_missing && seen_.lapses == 0)) {
      return {};
    }
    for (const int r : lower) {
      together.remove(r);
    }
    RankSet living = RankSet::first(world());
    for (int r = 0; r < world(); ++r) {
      if (seen_.dead.has(r)) {
        living.remove(r);
      }
    }
    if (!may_go_on(together, living)) {
      // A rank that left may still turn out to be dead.
      return {seen_.lapses == 0 ? StepKind::wait : StepKind::too_few};
    }
    Ballot ballot = own_;
    ballot.proposer = rank_;
    ballot.members = together;
    return {StepKind::say, ballot};
  }

  int rank_;
  const BallotView& seen_;
  const Ballot& own_;
  RankSet allowed_;
};

}  // namespace

bool may_go_on(const RankSet& together, const RankSet& living) {
  const int twice = 2 * together.count();
  return twice > living.count() || (twice == living.count() && together.has(living.lowest()));
}

Ballot arrive(const Ballot& before, int rank, const BallotView& seen) {
  Ballot ballot = before;
  if (before.state == BallotState::silent) {
    ballot.bound = RankSet::first(static_cast<int>(seen.ballots.size()));
  }
  if (before.state == BallotState::went_on) {
    ballot.past = before.round;
  }
  uint32_t round = before.round + 1;
  for (int r = 0; r < static_cast<int>(seen.ballots.size()); ++r) {
    const Ballot& its = seen.ballots[static_cast<size_t>(r)];
    if (r != rank && its.state == BallotState::here && ballot.bound.has(r)) {
      round = std::max(round, its.round);
    }
  }
  return here_in(round, ballot);
}

Ballot another_round(const Ballot& own) { return here_in(own.round + 1, own); }

Ballot met(const Ballot& own, const Ballot& proposal) {
  Ballot ballot = own;
  ballot.state = BallotState::met;
  ballot.proposer = proposal.proposer;
  ballot.members = proposal.members;
  ballot.guests = proposal.guests;
  return ballot;
}

NextStep next_step(int rank, const BallotView& seen) { return Rules(rank, seen).next(); }

}  // namespace dpcore
