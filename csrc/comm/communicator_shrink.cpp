// shrink() and grow(): carry out what group/agreement.h decides. The ranks agree in the control
// blocks of the first communicator of the line, which stays open for that, and meet anew under a
// name that follows from the round: new arenas, new connections, nothing that a rank which was left
// behind could still write into.
//
// grow() is the same before anything has failed: all ranks of the communicator come, and the first
// proposal has places for ranks that join (guests), behind those of the members. If a rank has died
// or the guests do not come, the members meet without them, as after a failure.
//
// Every wait ends: for ballots with the patience, for a meeting with its deadline, and all of them
// together after kMostPatiences.
#include <algorithm>
#include <cstdio>
#include <string>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fault.h"
#include "comm/communicator.h"

namespace dpcore {
namespace {

constexpr int64_t kLookNs = 10'000'000;
constexpr int kMostPatiences = 8;
constexpr int kMostMeetings = 3;  // in vain, with the same ranks
constexpr size_t kPageBytes = 4096;

struct AnotherRound {};  // out of a meeting: one of its ranks will not come

std::string ranks_in(const RankSet& set) {
  std::string text;
  for (int r = 0; r < kMostSurvivors; ++r) {
    if (set.has(r)) {
      text += (text.empty() ? "" : ", ") + std::to_string(r);
    }
  }
  return text.empty() ? "none" : text;
}

}  // namespace

class Shrinking {
 public:
  Shrinking(Communicator& failed, const Guests& guests, double patience_s,
            const Engine::Interrupt& interrupt)
      : failed_(failed),
        first_(failed.first_ ? failed.first_ : failed.shared_from_this()),
        board_(first_->group()),
        patience_ns_(to_ns(patience_s > 0 ? patience_s : failed.timeout_s())),
        guests_(guests),
        interrupt_(interrupt),
        began_ns_(now_ns()) {
    check();
  }

  std::shared_ptr<Communicator> run() {
    failed_.group_->failure().acknowledge();
    reach(0);
    failed_.context_->engine().drain(*failed_.group_, began_ns_ + patience_ns_, interrupt_);
    const BallotView before = look();
    Ballot own = arrive(before.ballots[rank()], rank(), before);
    own.completed = failed_.group_->mine().over_below.load(std::memory_order_relaxed);
    first_round_ = own.round;
    say(own);
    reach(1);
    for (;;) {
      Doorbell& bell = board_.endpoint().bell();
      const uint32_t rings = bell.announce_sleep();
      const BallotView view = look();
      const NextStep next = next_step(rank(), view);
      if (next.kind == StepKind::wait) {
        board_.endpoint().sleep(rings, kLookNs);
      }
      bell.withdraw();
      if (next.kind == StepKind::go_on) {
        return go_on(next.ballot, view);
      }
      follow(next, view);
      call_interrupt();
      check_deadline();
    }
  }

 private:
  int rank() const { return board_.rank(); }
  std::string who() const { return "rank " + std::to_string(failed_.rank()) + ": "; }
  void reach(uint64_t step) const { fault::reach(fault::Point::shrink, rank(), step); }
  void call_interrupt() const {
    if (interrupt_) {
      interrupt_();
    }
  }

  void check() const {
    failed_.check_not_forked();
    if (failed_.is_shrunk_) {
      throw Error(who() +
                  "this communicator was shrunk before; use the one that shrink() returned");
    }
    if (failed_.closed()) {
      throw Error(who() + "this communicator was finalized; call init() for a new one");
    }
    if (board_.world() > kMostSurvivors) {
      throw Unsupported(who() + "shrink() is for communicators of at most " +
                        std::to_string(kMostSurvivors) + " ranks, and this one had " +
                        std::to_string(board_.world()) + " at the start");
    }
    if (guests_.count == 0 && !failed_.group_->fails_during("before shrink() was called")) {
      throw Unsupported(who() + "nothing has failed in this communicator of " +
                        std::to_string(failed_.world()) +
                        " ranks, so there is nothing to shrink; call shrink() after PeerLost or "
                        "Timeout, or split() for a part of the ranks");
    }
  }

  void check_deadline() const {
    if (now_ns() - began_ns_ > kMostPatiences * std::min(patience_ns_, kForeverNs / 100)) {
      throw Timeout(who() + "shrink() has waited " + std::to_string(kMostPatiences) +
                    " times as long as ranks may take to come, and the ranks still do not agree on "
                    "which of them go on (round " +
                    std::to_string(own().round) + "); start the job again");
    }
  }

  Ballot own() const { return board_.mine().ballots.read(); }

  BallotView look() {
    if (first_->endpoint().network() != nullptr) {
      first_->context_->engine().take_in_control();
    }
    BallotView view = board_.look_at_ballots();
    view.lapses =
        static_cast<int>(std::min<int64_t>((now_ns() - state_began_ns_) / patience_ns_, 1000));
    if (held_.guests > 0) {
      view.held_round = held_.round;
      view.held_proposer = held_.proposer;
    }
    return view;
  }

  void say(const Ballot& ballot) {
    const Ballot before = own();
    if (before.round != ballot.round || before.state != ballot.state) {
      state_began_ns_ = now_ns();
    }
    if (before.round != ballot.round || ballot.state == BallotState::here) {
      met_.reset();
    }
    board_.say(ballot);
  }

  void follow(const NextStep& next, const BallotView& view) {
    switch (next.kind) {
      case StepKind::wait:
      case StepKind::go_on:
        return;
      case StepKind::say:
        propose_or_say(next.ballot, view);
        return;
      case StepKind::meet:
        meet(view.ballots[next.rank]);
        return;
      case StepKind::out:
        throw PeerLost(who() +
                       "the other ranks went on without this one, which had not come to "
                       "shrink() when they agreed (it was stopped, slow, or out of their "
                       "reach). Its state is behind theirs: end this process");
      case StepKind::too_few:
        throw_too_few(view);
    }
  }

  [[noreturn]] void throw_too_few(const BallotView& view) const {
    RankSet here;
    for (int r = 0; r < board_.world(); ++r) {
      const Ballot& ballot = view.ballots[r];
      if (r == rank() || (!view.dead.has(r) && !view.away.has(r) && ballot.round == own().round)) {
        here.add(r);
      }
    }
    throw PeerLost(
        who() + "of the " + std::to_string(board_.world()) + " ranks that met in init(), " +
        std::to_string(view.dead.count()) + " are known to be dead (" + ranks_in(view.dead) +
        ") and " + std::to_string(here.count()) + " came to shrink() (" + ranks_in(here) +
        "). Fewer than half of those that may live, or half without the lowest of them, do not go "
        "on, since the others may. Start the job again");
  }

  void propose_or_say(Ballot ballot, const BallotView& view) {
    const bool proposes = ballot.proposer == rank() && view.ballots[rank()].proposer != rank();
    listener_ = nullptr;
    if (proposes && guests_.count > 0 && ballot.round == first_round_ &&
        places_of(ballot.members) == places_of_all()) {
      ballot.guests = static_cast<uint32_t>(guests_.count);
      // Jobs of one rank have no names of their own; the meeting has to.
      std::snprintf(ballot.meeting, sizeof(ballot.meeting), "%llx",
                    static_cast<unsigned long long>(now_ns()));
    }
    if (proposes && needs_network(ballot)) {
      listener_ = std::make_shared<TcpSocket>(TcpSocket::listen_at(
          TcpAddress::resolve(board_.endpoint().address()).front().with_port(0)));
      std::snprintf(ballot.meeting, sizeof(ballot.meeting), "%s",
                    listener_->local_address().text().c_str());
    }
    say(ballot);
    if (proposes) {
      reach(2);
    }
  }

  bool needs_network(const Ballot& proposal) const {
    const RankSet& members = proposal.members;
    const Endpoint& endpoint = board_.endpoint();
    if (proposal.guests > 0 && first_->options_.tcp) {
      return true;
    }
    const int host = endpoint.host_of(board_.member(members.lowest()));
    for (int r = 0; r < board_.world(); ++r) {
      if (members.has(r) && endpoint.host_of(board_.member(r)) != host) {
        return true;
      }
    }
    return false;
  }

  Options options_of(const Ballot& proposal) {
    Options options = first_->options_;
    char name[64];
    std::snprintf(name, sizeof(name), "~%llx.%x.%x",
                  static_cast<unsigned long long>(board_.mine().group), proposal.round,
                  static_cast<unsigned>(proposal.proposer));
    options.job += name;
    if (proposal.guests > 0) {  // the first of a line again, and names must not grow with each
      const std::string& before = first_->options_.job;
      std::snprintf(
          name, sizeof(name), "~%016llx",
          static_cast<unsigned long long>(Endpoint::job_of(options.job + proposal.meeting)));
      options.job = before.substr(0, before.find('~')) + name;
    }
    options.rank = 0;
    options.world = proposal.members.count() + static_cast<int>(proposal.guests);
    for (int r = 0; r < rank(); ++r) {
      options.rank += proposal.members.has(r) ? 1 : 0;
    }
    options.meets_within_s = static_cast<double>(patience_ns_) * 1e-9;
    options.threads = board_.endpoint().shares_process();
    options.costs = board_.endpoint().costs();
    if (!needs_network(proposal)) {
      options.tcp = nullptr;
    } else {
      options.tcp = std::make_shared<TcpOptions>(*options.tcp);
      options.tcp->root = proposal.meeting;
      options.tcp->listener = listener_;
    }
    if (options.link) {
      options.link = options.link->between(places_of(proposal.members));
    }
    options.interrupt = [this, &proposal] {
      call_interrupt();
      if (proposal.guests > 0 && guests_.are_gone && guests_.are_gone()) {
        throw RendezvousError("a rank that joins has gone");
      }
      const NextStep next = next_step(rank(), look());
      if (next.kind != StepKind::meet || next.rank != proposal.proposer) {
        throw AnotherRound();
      }
    };
    return options;
  }

  std::vector<int> places_of(const RankSet& members) const {
    std::vector<int> places;
    for (int r = 0; r < board_.world(); ++r) {
      if (members.has(r)) {
        places.push_back(r);
      }
    }
    return places;
  }

  std::vector<int> places_of_all() const {
    return failed_.places_.empty() ? places_of(RankSet::first(board_.world())) : failed_.places_;
  }

  void meet(const Ballot& proposal) {
    reach(3);
    try {
      const Options options = options_of(proposal);
      if (proposal.guests > 0 && guests_.invite) {
        const bool shares_memory = !options.tcp || options.tcp->shares_memory;
        guests_.invite(options.job, options.tcp ? options.tcp->root : "", shares_memory);
      }
      (proposal.guests > 0 ? met_with_guests_ : met_) = Communicator::start(options);
    } catch (const AnotherRound&) {
      return;
    } catch (const RendezvousError&) {
      in_vain_ = proposal.members == met_in_vain_ ? in_vain_ + 1 : 1;
      met_in_vain_ = proposal.members;
      if (in_vain_ == kMostMeetings) {
        throw;
      }
      say(another_round(own()));
      return;
    }
    reach(4);
    say(met(own(), proposal));
    if (proposal.guests > 0) {
      held_ = own();
    }
    reach(5);
  }

  std::shared_ptr<Communicator> go_on(const Ballot& ballot, const BallotView& view) {
    std::shared_ptr<Communicator> next = std::move(ballot.guests > 0 ? met_with_guests_ : met_);
    const std::vector<int> places = places_of(ballot.members);
    next->completed_before_ = ballot.completed;
    for (const int r : places) {
      const Ballot& its = view.ballots[r];
      if (its.past == ballot.past) {  // it has not gone on since, and failed once more
        next->completed_before_ = std::min(next->completed_before_, its.completed);
      }
      next->survivors_.push_back(rank_before(r));
    }
    board_.say(ballot);
    reach(6);
    failed_.first_.reset();
    failed_.is_shrunk_ = true;
    if (ballot.guests > 0) {
      next->before_ = first_;
    } else {
      let_go_of_memory();
      next->places_ = places;
      next->first_ = first_;
    }
    return next;
  }

  int rank_before(int place) const {
    const std::vector<int>& places = failed_.places_;
    return places.empty()
               ? place
               : static_cast<int>(std::find(places.begin(), places.end(), place) - places.begin());
  }

  // Of the first communicator nothing is needed any more but its control blocks. Other groups of
  // its endpoint may still be at work, perhaps on what a dead rank has left them.
  void let_go_of_memory() {
    first_->shared_->take_blocks();
    if (!first_->context_->has_further_groups()) {
      const size_t control = Group::control_bytes(board_.world());
      board_.endpoint().drop_pages_of_ended((control + kPageBytes - 1) / kPageBytes * kPageBytes);
    }
  }

  Communicator& failed_;
  std::shared_ptr<Communicator> first_;
  Group& board_;
  int64_t patience_ns_;
  const Guests& guests_;
  const Engine::Interrupt& interrupt_;
  int64_t began_ns_;
  int64_t state_began_ns_ = began_ns_;
  uint32_t first_round_ = 0;
  std::shared_ptr<Communicator> met_with_guests_;  // until this rank has gone on
  Ballot held_;                                    // of that meeting
  std::shared_ptr<TcpSocket> listener_;            // of this rank's proposal
  std::shared_ptr<Communicator> met_;              // until all have met
  RankSet met_in_vain_;
  int in_vain_ = 0;
};

std::shared_ptr<Communicator> Communicator::shrink(double patience_s,
                                                   const Engine::Interrupt& interrupt) {
  return Shrinking(*this, {}, patience_s, interrupt).run();
}

std::shared_ptr<Communicator> Communicator::grow(const Guests& guests, double patience_s,
                                                 const Engine::Interrupt& interrupt) {
  return Shrinking(*this, guests, patience_s, interrupt).run();
}

void Communicator::let_go_of_before() {
  if (const auto before = std::move((first_ ? *first_ : *this).before_)) {
    before->is_shrunk_ = false;
    before->close();
  }
}

}  // namespace dpcore
