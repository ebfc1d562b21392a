// What a rank says while the ranks of a communicator that failed agree on who goes on (see
// group/agreement.h), and the place in its control block where the others read it.
//
// A ballot box has two places, of which one is written while the other is valid: a rank that is
// killed in the middle of writing leaves what it had said before. One thread writes at a time; any
// thread of any process reads. The boxes of remote ranks are written from frames.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace dpcore {

inline constexpr int kMostSurvivors = 1024;  // ranks of a communicator that can be shrunk
inline constexpr size_t kMeetingBytes = 80;

class RankSet {
 public:
  static RankSet first(int count) {
    RankSet all;
    for (int r = 0; r < count; ++r) {
      all.add(r);
    }
    return all;
  }
  bool has(int r) const { return (words_[word(r)] >> (r % 64) & 1) != 0; }
  void add(int r) { words_[word(r)] |= uint64_t{1} << (r % 64); }
  void remove(int r) { words_[word(r)] &= ~(uint64_t{1} << (r % 64)); }
  int count() const {
    int sum = 0;
    for (const uint64_t bits : words_) {
      sum += std::popcount(bits);
    }
    return sum;
  }
  bool empty() const { return *this == RankSet(); }
  // -1 of an empty set.
  int lowest() const {
    for (size_t i = 0; i < words_.size(); ++i) {
      if (words_[i] != 0) {
        return static_cast<int>(i) * 64 + std::countr_zero(words_[i]);
      }
    }
    return -1;
  }
  void keep(const RankSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) {
      words_[i] &= other.words_[i];
    }
  }
  bool operator==(const RankSet&) const = default;

 private:
  static size_t word(int r) { return static_cast<size_t>(r) / 64; }
  std::array<uint64_t, kMostSurvivors / 64> words_{};
};

// silent    it has not called shrink()
// here      it has (or grow()), and touches no memory of others any more; it proposes if it is the
// `proposer` met       it holds a communicator of `members`, and waits until all of them do went_on
// it has returned that communicator to its program
enum class BallotState : uint32_t { silent, here, met, went_on };

struct Ballot {
  uint32_t round = 0;
  BallotState state = BallotState::silent;
  int32_t proposer = -1;   // the rank that proposed the members; -1: there are none
  uint32_t past = 0;       // the round that made the communicator which failed here; 0: the first
  uint64_t completed = 0;  // operations that this rank had completed there
  RankSet bound;           // it goes on with no other ranks than these
  RankSet members;
  uint32_t guests = 0;               // ranks of no earlier communicator that meet the members
  char meeting[kMeetingBytes] = {};  // where the proposer listens, if members are on other hosts
  bool operator==(const Ballot&) const = default;
};

class BallotBox {
 public:
  // By one thread at a time.
  void write(const Ballot& ballot) {
    const uint64_t next = written_.load(std::memory_order_relaxed) + 1;
    places_[next % 2] = ballot;
    written_.store(next, std::memory_order_release);
  }
  Ballot read() const {
    for (;;) {
      const uint64_t written = written_.load(std::memory_order_acquire);
      const Ballot ballot = places_[written % 2];
      std::atomic_thread_fence(std::memory_order_acquire);
      if (written_.load(std::memory_order_relaxed) == written) {
        return ballot;
      }
    }
  }

 private:
  std::atomic<uint64_t> written_;  // how often
  Ballot places_[2];
};

}  // namespace dpcore
