// The symbolic execution behind check(). Chunks never meet: a move changes one chunk, by what the
// same chunk of another rank contains. So each chunk is proved by itself, which keeps the state
// as small as one set per rank.
#include "comm/schedule/check.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "comm/base/error.h"

namespace dpcore {
namespace {

// The number of chunks that the collective prescribes, or 0 if the algorithm may choose.
int64_t prescribed_chunks(const Schedule& schedule) {
  const int64_t world = schedule.world;
  const bool by_giver = joins(schedule.collective);
  const bool by_taker = splits(schedule.collective);
  return by_giver && by_taker ? world * world : by_giver || by_taker ? world : 0;
}

// The rank that holds `chunk` at the beginning, where there is only one.
int origin_of(const Schedule& schedule, int chunk) {
  switch (schedule.collective) {
    case Collective::all_gather:
    case Collective::gather:
      return chunk;
    case Collective::all_to_all:
      return chunk / schedule.world;
    default:
      return schedule.root;  // broadcast, scatter
  }
}

bool must_end_with(const Schedule& schedule, int rank, int chunk) {
  switch (schedule.collective) {
    case Collective::reduce_scatter:
    case Collective::scatter:
      return rank == chunk;
    case Collective::reduce:
    case Collective::gather:
      return rank == schedule.root;
    case Collective::all_to_all:
      return rank == chunk % schedule.world;
    default:
      return true;  // all_reduce, all_gather, broadcast
  }
}

// A set of ranks.
class Contributions {
 public:
  explicit Contributions(int world) : words_((static_cast<size_t>(world) + 63) / 64) {}

  void add(int rank) { words_[word_of(rank)] |= bit_of(rank); }
  bool contains(int rank) const { return (words_[word_of(rank)] & bit_of(rank)) != 0; }
  bool empty() const { return size() == 0; }
  bool is_just(int rank) const { return contains(rank) && size() == 1; }
  bool overlaps(const Contributions& other) const {
    for (size_t i = 0; i < words_.size(); ++i) {
      if ((words_[i] & other.words_[i]) != 0) {
        return true;
      }
    }
    return false;
  }
  void merge(const Contributions& other) {
    for (size_t i = 0; i < words_.size(); ++i) {
      words_[i] |= other.words_[i];
    }
  }
  bool operator==(const Contributions&) const = default;

 private:
  static size_t word_of(int rank) { return static_cast<size_t>(rank) / 64; }
  static uint64_t bit_of(int rank) { return uint64_t{1} << (rank % 64); }
  int size() const {
    int ranks = 0;
    for (uint64_t word : words_) {
      ranks += std::popcount(word);
    }
    return ranks;
  }

  std::vector<uint64_t> words_;
};

class Proof {
 public:
  // Throws unless the schedule is right, whatever it says about its order.
  explicit Proof(const Schedule& schedule) : schedule_(schedule) {
    check_shape();
    for (size_t i = 0; i < schedule_.moves.size(); ++i) {
      check_move(i);
    }
    completing_.assign(schedule_.moves.size(), false);
    arrival_at_.assign(static_cast<size_t>(schedule_.world), kNone);
    prove_all_chunks();
  }

  const std::vector<bool>& completing() const { return completing_; }
  bool ordered() const { return first_unordered_move_ == kNone; }

  void check_claim() const {
    if (!schedule_.ordered || ordered()) {
      return;
    }
    fail_at(first_unordered_move_,
            "it calls itself ordered, but the contributions to this chunk are not added all at "
            "once, each from the rank that it belongs to");
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  // What arrives at one rank, kept apart until the step is over: all moves of a step read what
  // was there before it.
  struct Arrival {
    int dst;
    bool reduce;
    Contributions value;
  };

  void check_shape() const {
    if (schedule_.collective == Collective::barrier) {
      fail("a barrier moves no data");
    }
    if (schedule_.world < 1) {
      fail("there must be at least one rank");
    }
    if (schedule_.root < 0 || schedule_.root >= schedule_.world) {
      fail("root " + std::to_string(schedule_.root) + " is not a rank");
    }
    if (schedule_.chunks < 1) {
      fail("there must be at least one chunk");
    }
    const int64_t prescribed = prescribed_chunks(schedule_);
    if (prescribed != 0 && schedule_.chunks != prescribed) {
      fail("it has " + std::to_string(schedule_.chunks) + " chunks and must have " +
           std::to_string(prescribed));
    }
  }

  void check_move(size_t index) const {
    const Move& move = schedule_.moves[index];
    if (move.step < 0) {
      fail_at(index, "the step is negative");
    }
    if (index > 0 && move.step < schedule_.moves[index - 1].step) {
      fail_at(index, "moves must be sorted by step");
    }
    if (move.src < 0 || move.src >= schedule_.world) {
      fail_at(index, "there is no such source");
    }
    if (move.dst < 0 || move.dst >= schedule_.world) {
      fail_at(index, "there is no such destination");
    }
    if (move.chunk < 0 || move.chunk >= schedule_.chunks) {
      fail_at(index, "there is no such chunk");
    }
    if (move.src == move.dst) {
      fail_at(index, "a rank sends to itself");
    }
    if (move.reduce && !reduces(schedule_.collective)) {
      fail_at(index, "this collective has no reduction");
    }
  }

  void prove_all_chunks() {
    std::vector<size_t> by_chunk(schedule_.moves.size());
    std::iota(by_chunk.begin(), by_chunk.end(), size_t{0});
    std::stable_sort(by_chunk.begin(), by_chunk.end(), [&](size_t a, size_t b) {
      return schedule_.moves[a].chunk < schedule_.moves[b].chunk;
    });
    std::span<const size_t> rest(by_chunk);
    for (int chunk = 0; chunk < schedule_.chunks; ++chunk) {
      rest = rest.subspan(prove_chunk(chunk, rest));
    }
  }

  // `moves` begins with those of this chunk, in the order of their steps. Returns how many.
  size_t prove_chunk(int chunk, std::span<const size_t> moves) {
    give_initial_holdings(chunk);
    size_t begin = 0;
    size_t end = 0;
    const auto same_chunk = [&](size_t i) {
      return i < moves.size() && schedule_.moves[moves[i]].chunk == chunk;
    };
    for (; same_chunk(begin); begin = end) {
      const int step = schedule_.moves[moves[begin]].step;
      while (same_chunk(end) && schedule_.moves[moves[end]].step == step) {
        ++end;
      }
      prove_step(moves.subspan(begin, end - begin));
    }
    for (int rank = 0; rank < schedule_.world; ++rank) {
      if (must_end_with(schedule_, rank, chunk)) {
        require_complete(rank, chunk);
      }
    }
    return end;
  }

  void give_initial_holdings(int chunk) {
    complete_ = Contributions(schedule_.world);
    if (reduces(schedule_.collective)) {
      for (int rank = 0; rank < schedule_.world; ++rank) {
        complete_.add(rank);
      }
    } else {
      complete_.add(origin_of(schedule_, chunk));
    }
    held_.assign(static_cast<size_t>(schedule_.world), Contributions(schedule_.world));
    for (int rank = 0; rank < schedule_.world; ++rank) {
      if (complete_.contains(rank)) {
        held_by(rank).add(rank);
      }
    }
  }

  void prove_step(std::span<const size_t> moves) {
    std::vector<Arrival> arrivals;
    for (size_t index : moves) {
      const Move& move = schedule_.moves[index];
      const Contributions& incoming = held_by(move.src);
      const Contributions& own = held_by(move.dst);
      if (incoming.empty()) {
        fail_at(index, "rank " + std::to_string(move.src) + " does not hold this chunk yet");
      }
      size_t& at = arrival_at_[static_cast<size_t>(move.dst)];
      if (at == kNone) {
        at = arrivals.size();
        arrivals.push_back(
            {move.dst, move.reduce, move.reduce ? own : Contributions(schedule_.world)});
      } else if (!arrivals[at].reduce && !move.reduce) {
        fail_at(index, "the chunk is copied into twice in one step");
      } else if (arrivals[at].reduce != move.reduce) {
        fail_at(index, "the chunk is both copied and reduced into in one step");
      }
      Contributions& value = arrivals[at].value;
      if (value.overlaps(incoming)) {
        fail_double_count(index, value, incoming);
      }
      value.merge(incoming);
      const bool single = own.is_just(move.dst) && incoming.is_just(move.src);
      if (move.reduce && !single) {
        record_unordered(index);
      }
    }
    for (size_t index : moves) {
      const Move& move = schedule_.moves[index];
      if (!move.reduce) {
        continue;
      }
      const Arrival& arrival = arrivals[arrival_at_[static_cast<size_t>(move.dst)]];
      completing_[index] = arrival.value == complete_;
      if (!completing_[index]) {
        record_unordered(index);
      }
    }
    for (Arrival& arrival : arrivals) {
      held_by(arrival.dst) = std::move(arrival.value);
      arrival_at_[static_cast<size_t>(arrival.dst)] = kNone;
    }
  }

  Contributions& held_by(int rank) { return held_[static_cast<size_t>(rank)]; }

  void record_unordered(size_t index) {
    first_unordered_move_ = std::min(first_unordered_move_, index);
  }

  void require_complete(int rank, int chunk) {
    const Contributions& value = held_by(rank);
    if (value == complete_) {
      return;
    }
    int missing = 0;
    while (!complete_.contains(missing) || value.contains(missing)) {
      ++missing;
    }
    fail("at the end, chunk " + std::to_string(chunk) + " of rank " + std::to_string(rank) +
         " lacks the contribution of rank " + std::to_string(missing));
  }

  [[noreturn]] void fail_double_count(size_t index, const Contributions& value,
                                      const Contributions& incoming) const {
    int rank = 0;
    while (!value.contains(rank) || !incoming.contains(rank)) {
      ++rank;
    }
    fail_at(index, "the contribution of rank " + std::to_string(rank) + " would be added twice");
  }

  [[noreturn]] void fail_at(size_t index, const std::string& what) const {
    const Move& move = schedule_.moves[index];
    fail("move " + std::to_string(index) + " (step " + std::to_string(move.step) + ", rank " +
         std::to_string(move.src) + " -> rank " + std::to_string(move.dst) + ", chunk " +
         std::to_string(move.chunk) + (move.reduce ? ", reduce" : ", copy") + "): " + what);
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error("schedule '" + schedule_.algorithm + "' for " +
                std::string(name_of(schedule_.collective)) + " with " +
                std::to_string(schedule_.world) + " ranks is wrong: " + what +
                "; correct the list of moves");
  }

  const Schedule& schedule_;
  std::vector<bool> completing_;
  size_t first_unordered_move_ = kNone;
  // The chunk under proof: what a complete copy contains, and what each rank's copy contains.
  Contributions complete_{1};
  std::vector<Contributions> held_;
  // Where in the list of arrivals of this step a rank's is.
  std::vector<size_t> arrival_at_;
};

}  // namespace

void check(const Schedule& schedule) { Proof(schedule).check_claim(); }

std::vector<bool> completing_moves(const Schedule& schedule) {
  const Proof proof(schedule);
  proof.check_claim();
  return proof.completing();
}

bool is_ordered(const Schedule& schedule) { return Proof(schedule).ordered(); }

}  // namespace dpcore
