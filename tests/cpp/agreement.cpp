// The agreement of the ranks that survive (comm/group/agreement.h), checked by going through every
// interleaving of three ranks, of which some may die at any moment, and of which some may take
// ranks for gone that live.
//
//   agreement memory DEATHS MISTAKES   a ballot is seen by all at once
//   agreement tcp DEATHS MISTAKES      it arrives at each rank some time later, in order; of one
//                                      that died, perhaps never
//   agreement cut DEATHS MISTAKES      one rank and the other two hear nothing of each other
//   agreement grow DEATHS MISTAKES     as memory, and nothing has failed: they take in a guest
//   agreement grow_tcp DEATHS MISTAKES
//
// Held in every state: at most one communicator has all its members in it, so at most one can make
// progress; and it has no member that was left behind by an earlier one. Held in every state in
// which nothing can happen any more: every rank that lives is in that one communicator, or was told
// that it is not.
#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/group/agreement.h"

using namespace dpcore;

namespace {

constexpr int kRanks = 3;
constexpr int kMostOnTheWay = 12;
constexpr int kMostRounds = 12;
constexpr int kMostLapses = kRanks + 1;
constexpr uint8_t kAll = (1 << kRanks) - 1;

// A ballot in six bytes, which are compared.
struct Said {
  uint8_t round = 0;
  uint8_t state = 0;
  int8_t proposer = -1;
  uint8_t bound = 0;
  uint8_t members = 0;
  uint8_t guests = 0;
  bool operator==(const Said&) const = default;
};

RankSet set_of(uint8_t bits) {
  RankSet set;
  for (int r = 0; r < kRanks; ++r) {
    if ((bits >> r & 1) != 0) {
      set.add(r);
    }
  }
  return set;
}

uint8_t bits_of(const RankSet& set) {
  uint8_t bits = 0;
  for (int r = 0; r < kRanks; ++r) {
    bits |= static_cast<uint8_t>(set.has(r) ? 1 << r : 0);
  }
  return bits;
}

Ballot ballot_of(const Said& said) {
  Ballot ballot;
  ballot.round = said.round;
  ballot.state = static_cast<BallotState>(said.state);
  ballot.proposer = said.proposer;
  ballot.bound = set_of(said.bound);
  ballot.members = set_of(said.members);
  ballot.guests = said.guests;
  return ballot;
}

Said said_by(const Ballot& ballot) {
  return {static_cast<uint8_t>(ballot.round),
          static_cast<uint8_t>(ballot.state),
          static_cast<int8_t>(ballot.proposer),
          bits_of(ballot.bound),
          bits_of(ballot.members),
          static_cast<uint8_t>(ballot.guests)};
}

enum Place : uint8_t { computes, agrees, is_over, is_dead };

// Bytes only: two states are the same if their bytes are.
struct State {
  std::array<uint8_t, kRanks> place{};
  std::array<Said, kRanks> said;
  std::array<Said, kRanks> held;                   // of a meeting with the guest
  Said seen[kRanks][kRanks];                       // [by][of]
  Said on_the_way[kRanks][kRanks][kMostOnTheWay];  // [to][from]
  uint8_t count[kRanks][kRanks]{};
  std::array<uint8_t, kRanks> dead{};  // that it knows of
  std::array<uint8_t, kRanks> away{};
  std::array<uint8_t, kRanks> lapses{};
  uint8_t came[kMostRounds][kRanks]{};  // [round][proposer]: to that meeting
  uint8_t in_last = kAll;               // members of the last communicator that had them all
  uint8_t deaths_left = 0;
  uint8_t mistakes_left = 0;
  uint8_t cut_off = kRanks;  // the rank that hears nothing, and is not heard
};

class Checker {
 public:
  explicit Checker(std::string_view how)
      : over_tcp_(how == "tcp" || how == "grow_tcp"),
        is_cut_(how == "cut"),
        grows_(how == "grow" || how == "grow_tcp") {}

  void run(uint8_t deaths, uint8_t mistakes) {
    State begin;
    begin.deaths_left = deaths;
    begin.mistakes_left = mistakes;
    troubles_ = deaths + mistakes;
    mistakes_ = mistakes;
    visit(begin);
    for (uint8_t r = 0; is_cut_ && r < kRanks; ++r) {
      begin.cut_off = r;
      visit(begin);
    }
  }
  size_t states() const { return known_.size(); }
  size_t ends() const { return ends_; }
  size_t deadlines() const { return deadlines_; }

 private:
  void visit(const State& state) {
    const std::string_view bytes(reinterpret_cast<const char*>(&state), sizeof(state));
    const auto half = std::hash<std::string_view>();
    if (!known_.insert({half(bytes), half(bytes.substr(1))}).second) {
      return;
    }
    way_.push_back(&state);
    hold(state);
    if (!go_through(state)) {
      quiet(state);
    }
    way_.pop_back();
  }

  // With the way that led there.
  void fail(const char* what) const {
    for (const State* state : way_) {
      for (int r = 0; r < kRanks; ++r) {
        const Said& own = state->said[r];
        std::fprintf(stderr,
                     "%s%d: place %d, round %d, state %d, %d proposed %d, bound %d, dead %d, "
                     "away %d, lapses %d",
                     r == 0 ? "" : " | ", r, state->place[r], own.round, own.state, own.proposer,
                     own.members, own.bound, state->dead[r], state->away[r], state->lapses[r]);
      }
      std::fprintf(stderr, "\n");
    }
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
  }

  static bool lives(const State& state, int r) { return state.place[r] != is_dead; }

  // The communicator that a rank computes in; the first one is that of round 0.
  static bool is_together(const State& state, int r) {
    const Said& own = state.said[r];
    const uint8_t members =
        own.state == static_cast<uint8_t>(BallotState::silent) ? kAll : own.members;
    for (int m = 0; m < kRanks; ++m) {
      const bool in_it = state.place[m] == computes && state.said[m].round == own.round &&
                         state.said[m].proposer == own.proposer;
      if ((members >> m & 1) != 0 && !in_it) {
        return false;
      }
    }
    return state.place[r] == computes;
  }

  // With the guest: no rank that lives computes elsewhere, unless one was taken for gone. Then they
  // may find in the next operation that they are apart, and one side ends.
  bool is_where_others_are(const State& state, int r) const {
    const Said& own = state.said[r];
    bool are_all = own.guests > 0;
    for (int m = 0; m < kRanks; ++m) {
      are_all = are_all &&
                (state.place[m] == is_dead || (state.place[m] == computes && state.said[m] == own));
    }
    return are_all || (grows_ && state.mistakes_left < mistakes_);
  }

  void hold(const State& state) const {
    const Said* together = nullptr;
    for (int r = 0; r < kRanks; ++r) {
      if (is_together(state, r)) {
        if (together != nullptr && (state.said[r].round != together->round ||
                                    state.said[r].proposer != together->proposer)) {
          fail("two communicators have all their members");
        }
        together = &state.said[r];
      }
    }
  }

  // A communicator that has all its members for the first time may have made progress.
  void note_progress(State& state) const {
    for (int r = 0; r < kRanks; ++r) {
      if (is_together(state, r) && state.said[r].round > 0) {
        if ((state.said[r].members & ~state.in_last) != 0) {
          fail("a rank that was left behind is in a communicator again");
        }
        state.in_last = state.said[r].members;
      }
    }
  }

  BallotView seen_by(const State& state, int r) const {
    BallotView seen;
    for (int of = 0; of < kRanks; ++of) {
      seen.ballots.push_back(ballot_of(of == r ? state.said[r] : state.seen[r][of]));
    }
    seen.dead = set_of(state.dead[r]);
    seen.away = set_of(state.away[r]);
    seen.lapses = state.lapses[r];
    seen.held_round = state.held[r].round;
    seen.held_proposer = state.held[r].proposer;
    return seen;
  }

  void say(State& state, int r, const Ballot& ballot) const {
    const Said said = said_by(ballot);
    if (said.round >= kMostRounds) {
      fail("rounds without end");
    }
    if (said.round != state.said[r].round || said.state != state.said[r].state) {
      state.lapses[r] = 0;
    }
    state.said[r] = said;
    for (int to = 0; to < kRanks; ++to) {
      if (to == r || to == state.cut_off || r == state.cut_off) {
        continue;
      }
      if (over_tcp_ && (state.place[to] == computes || state.place[to] == agrees)) {
        CHECK(state.count[to][r] < kMostOnTheWay);
        state.on_the_way[to][r][state.count[to][r]++] = said;
      } else if (!over_tcp_) {
        state.seen[to][r] = said;
      }
    }
  }

  static void arrives(State& state, int to, int from) {
    auto& queue = state.on_the_way[to][from];
    state.seen[to][from] = queue[0];
    std::copy(queue + 1, queue + kMostOnTheWay, queue);
    queue[kMostOnTheWay - 1] = Said();
    --state.count[to][from];
  }

  static void forget(State& state, int to, int from) {
    std::fill_n(state.on_the_way[to][from], kMostOnTheWay, Said());
    state.count[to][from] = 0;
  }

  // What such a rank knows plays no part any more.
  static void end(State& state, int r, Place place) {
    state.place[r] = place;
    state.dead[r] = state.away[r] = state.lapses[r] = 0;
    for (int of = 0; of < kRanks; ++of) {
      state.seen[r][of] = Said();
      forget(state, r, of);
    }
  }

  // Whether something can happen without a further death or mistake.
  bool go_through(const State& state) {
    bool goes_on = false;
    for (int r = 0; r < kRanks; ++r) {
      if (state.place[r] == computes) {
        goes_on |= comes(state, r);
      } else if (state.place[r] == agrees) {
        goes_on |= hears(state, r);
        goes_on |= steps(state, r);
      }
    }
    for (int r = 0; r < kRanks; ++r) {
      if (state.deaths_left > 0 && lives(state, r)) {
        State next = state;
        --next.deaths_left;
        end(next, r, is_dead);
        visit(next);
      }
      if (state.mistakes_left > 0 && state.place[r] == agrees) {
        State next = state;
        --next.mistakes_left;
        ++next.lapses[r];
        visit(next);
      }
    }
    return goes_on;
  }

  bool hears(const State& state, int r) {
    bool any = false;
    for (int from = 0; from < kRanks; ++from) {
      if (state.count[r][from] > 0) {
        State next = state;
        arrives(next, r, from);
        visit(next);
        any = true;
      }
      const auto bit = static_cast<uint8_t>(1 << from);
      const bool ends = state.place[from] == is_dead || state.place[from] == is_over;
      if (!ends || r == state.cut_off || from == state.cut_off ||
          ((state.dead[r] | state.away[r]) & bit) != 0) {
        continue;
      }
      if (state.place[from] == is_dead) {  // what it had sent may be lost
        State next = state;
        forget(next, r, from);
        next.dead[r] |= bit;
        visit(next);
        any = true;
      } else if (state.count[r][from] == 0) {
        State next = state;
        next.away[r] |= bit;
        visit(next);
        any = true;
      }
    }
    return any;
  }

  // A rank comes when the communicator that it is in has failed: a member has died, is over, or
  // is in another one, or this rank takes it for gone.
  bool comes(const State& state, int r) {
    const Said& own = state.said[r];
    const uint8_t members =
        own.state == static_cast<uint8_t>(BallotState::silent) ? kAll : own.members;
    const bool may_take_for_gone = own.round == 0 && state.mistakes_left > 0;
    if (own.guests > 0) {
      return false;  // its line has other ballots
    }
    bool has_failed = grows_ && own.round == 0;
    for (int m = 0; m < kRanks; ++m) {
      if ((members >> m & 1) != 0 && m != r) {
        has_failed |= state.place[m] == is_over || state.place[m] == is_dead ||
                      state.said[m].round > own.round;
      }
    }
    if (!has_failed && !may_take_for_gone) {
      return false;
    }
    State next = state;
    next.place[r] = agrees;
    say(next, r, arrive(ballot_of(own), r, seen_by(state, r)));
    visit(next);
    return has_failed;
  }

  bool steps(const State& state, int r) {
    const NextStep step = next_step(r, seen_by(state, r));
    State next = state;
    switch (step.kind) {
      case StepKind::wait:
        return false;
      case StepKind::say:
        CHECK(said_by(step.ballot) != state.said[r]);
        if (Ballot ballot = step.ballot; grows_ && ballot.proposer == r && ballot.round == 1 &&
                                         bits_of(ballot.members) == kAll) {
          ballot.guests = 1;
          say(next, r, ballot);
          break;
        }
        say(next, r, step.ballot);
        break;
      case StepKind::meet: {
        const Ballot proposal =
            ballot_of(step.rank == r ? state.said[r] : state.seen[r][step.rank]);
        uint8_t& came = next.came[proposal.round][step.rank];
        if ((came >> r & 1) == 0) {
          came |= static_cast<uint8_t>(1 << r);
        } else if ((bits_of(proposal.members) & ~came) == 0) {
          say(next, r, met(ballot_of(state.said[r]), proposal));
          if (proposal.guests > 0) {
            next.held[r] = next.said[r];
          }
        } else {
          return false;
        }
        break;
      }
      case StepKind::go_on:
        say(next, r, step.ballot);
        next.place[r] = computes;
        note_progress(next);
        break;
      case StepKind::out:
      case StepKind::too_few:
        end(next, r, is_over);
        break;
    }
    visit(next);
    return true;
  }

  // Nothing happens but that time passes: for the ranks that wait, and for meetings.
  void quiet(const State& state) {
    bool waits = false;
    for (int r = 0; r < kRanks; ++r) {
      if (state.place[r] != agrees) {
        continue;
      }
      waits = true;
      if (state.lapses[r] < kMostLapses) {
        State next = state;
        ++next.lapses[r];
        if (next_step(r, seen_by(state, r)).kind == StepKind::meet) {
          say(next, r, another_round(ballot_of(state.said[r])));
        }
        visit(next);
      } else {
        State next = state;
        end(next, r, is_over);  // with an error, at the deadline
        visit(next);
        ++deadlines_;
      }
    }
    if (waits) {
      return;
    }
    ++ends_;
    int together = 0;
    for (int r = 0; r < kRanks; ++r) {
      CHECK(state.place[r] != computes || is_together(state, r) || is_where_others_are(state, r));
      together += state.place[r] == computes ? 1 : 0;
    }
    // After two of them, a rank may be half of those that may live, without the lowest.
    const int troubles = (is_cut_ ? 2 : 0) + troubles_ - state.deaths_left - state.mistakes_left;
    if (together == 0 && troubles < 2) {
      fail("no rank goes on");
    }
  }

  struct Halves {
    size_t operator()(const std::pair<size_t, size_t>& halves) const { return halves.first; }
  };
  bool over_tcp_;
  bool is_cut_;
  bool grows_;
  int troubles_ = 0;
  uint8_t mistakes_ = 0;
  std::unordered_set<std::pair<size_t, size_t>, Halves> known_;
  std::vector<const State*> way_;
  size_t deadlines_ = 0;
  size_t ends_ = 0;
};

}  // namespace

int main(int, char** arguments) {
  static_assert(std::has_unique_object_representations_v<State>);
  Checker checker(arguments[1]);
  checker.run(static_cast<uint8_t>(std::atoi(arguments[2])),
              static_cast<uint8_t>(std::atoi(arguments[3])));
  std::printf("%zu states, %zu ends, %zu deadlines\n", checker.states(), checker.ends(),
              checker.deadlines());
  return 0;
}
