// Kernels with a barrier (csrc/cuda/kernels/share_sync.h), as threads: several ranks, each with
// several blocks of several workers, reduce into each other's memory round after round, with random
// delays. Numbers begin shortly before 2^32. After each round comes a kernel that waits for no
// rank.
//
//   barriers WORLD SEED ROUNDS all     every round has the right sum on every rank
//   barriers WORLD SEED ROUNDS absent  then the last rank stays away: the others say so in time
//   barriers WORLD SEED ROUNDS stopped then it stays away, and the others are told to give up
//
// After the last two no rank's memory has been touched. Under the thread sanitizer: what a worker
// reads without a barrier between it and the worker that wrote it is a race here as it would be on
// a GPU.
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/kernels/reduce_job.h"
#include "cuda/mapped/flag_page.h"

using namespace dpcore;

namespace {

using Sums = element::Reducer<element::Plain<int32_t>, element::Sum, 2>;

constexpr int kBlocks = 3;
constexpr int kWorkers = 2;
constexpr size_t kElements = 1003;
constexpr uint64_t kLongPatience = 120'000'000'000;
constexpr uint64_t kShortPatience = 1'000'000'000;

// A block of a few threads, with the barrier that a GPU has.
struct BlockState {
  std::barrier<> barrier{kWorkers};
  std::atomic<bool> is_refused{false};
};

class ThreadsBlock {
 public:
  ThreadsBlock(BlockState& state, int index, int thread)
      : state_(state), index_(index), thread_(thread) {}
  int thread() const { return thread_; }
  int threads() const { return kWorkers; }
  int index() const { return index_; }
  int blocks() const { return kBlocks; }
  bool all(bool says) {
    if (!says) {
      state_.is_refused.store(true);
    }
    state_.barrier.arrive_and_wait();
    const bool result = !state_.is_refused.load();
    state_.barrier.arrive_and_wait();
    if (thread_ == 0) {
      state_.is_refused.store(false);
    }
    state_.barrier.arrive_and_wait();
    return result;
  }

 private:
  BlockState& state_;
  int index_;
  int thread_;
};

struct Rank {
  std::vector<int32_t> data = std::vector<int32_t>(kElements);
  SignalPad pad{};
  FlagPage page;
};

struct World {
  explicit World(int n) : ranks(static_cast<size_t>(n)) {
    for (auto& rank : ranks) {
      rank = std::make_unique<Rank>();
      prepare(rank->page);
      for (auto& row : rank->pad.arrived) {
        std::fill(std::begin(row), std::end(row), kFirstNumber);
      }
      std::fill(std::begin(rank->pad.rounds), std::end(rank->pad.rounds), kFirstNumber);
    }
  }
  std::vector<std::unique_ptr<Rank>> ranks;
};

void nap(std::mt19937& dice) {
  if (dice() % 3 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(dice() % 300));
  }
}

// A kernel from its launch until all its blocks have ended.
template <class Policy>
void run_blocks(const DeviceReduction& job, const ShareSync& sync, unsigned seed) {
  std::array<BlockState, kBlocks> states;
  std::vector<std::thread> workers;
  for (int index = 0; index < kBlocks; ++index) {
    for (int thread = 0; thread < kWorkers; ++thread) {
      workers.emplace_back([&, index, thread, dice = std::mt19937(seed + index)]() mutable {
        if (thread == 0) {
          nap(dice);
        }
        ThreadsBlock block(states[static_cast<size_t>(index)], index, thread);
        element::run_share<Sums, Policy>(job.shares, sync, block);
      });
    }
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
}

// One that doubles what a rank has, and waits for no rank.
void run_in_order(Rank& own, unsigned seed) {
  const void* twice[] = {own.data.data(), own.data.data()};
  void* out = own.data.data();
  ShareSync sync;
  sync.given_up = &own.page.given_up.value;
  sync.answer = &own.pad.answer;
  const DeviceReduction job = reduce_job({DType::i32, ReduceOp::sum}, twice, {&out, 1}, kElements);
  run_blocks<element::StreamOrder>(job, sync, seed);
}

// One that waits for those of the other ranks.
void run_kernel(World& world, int rank, unsigned seed, uint64_t patience) {
  const int n = static_cast<int>(world.ranks.size());
  // Each rank owns an equal share of every rank's data, the last one the rest too.
  const size_t share = kElements / static_cast<size_t>(n);
  const size_t begin = share * static_cast<size_t>(rank);
  const size_t count = rank == n - 1 ? kElements - begin : share;
  std::vector<const void*> in;
  std::vector<void*> out;
  ShareSync sync;
  for (int r = 0; r < n; ++r) {
    Rank& other = *world.ranks[static_cast<size_t>(r)];
    in.push_back(other.data.data() + begin);
    out.push_back(other.data.data() + begin);
    sync.pads[r] = &other.pad;
  }
  Rank& own = *world.ranks[static_cast<size_t>(rank)];
  sync.given_up = &own.page.given_up.value;
  sync.answer = &own.pad.answer;
  sync.late = &own.page.late.value;
  sync.patience_ns = patience;
  sync.rank = rank;
  sync.world = n;
  sync.blocks = kBlocks;
  sync.enters = sync.leaves = true;
  const DeviceReduction job = reduce_job({DType::i32, ReduceOp::sum}, in, out, count);
  run_blocks<element::InKernelBarrier>(job, sync, seed);
}

void fill(Rank& rank, int value) { std::fill(rank.data.begin(), rank.data.end(), value); }

void check(const Rank& rank, int expected) {
  for (const int32_t value : rank.data) {
    CHECK(value == expected);
  }
}

void run_rank(World& world, int rank, unsigned seed, int rounds, const std::string& end) {
  const int n = static_cast<int>(world.ranks.size());
  Rank& own = *world.ranks[static_cast<size_t>(rank)];
  std::mt19937 dice(seed * 100 + static_cast<unsigned>(rank));
  for (int round = 0; round < rounds; ++round) {
    fill(own, round + rank);
    nap(dice);
    run_kernel(world, rank, static_cast<unsigned>(dice()), kLongPatience);
    const int sum = n * round + n * (n - 1) / 2;
    check(own, sum);
    run_in_order(own, static_cast<unsigned>(dice()));
    check(own, 2 * sum);
  }
  CHECK(own.page.late.value == 0);
  if (end == "all" || rank == n - 1) {
    return;
  }
  fill(own, -1);
  std::thread host;  // of the rank: it gives up when it knows that a rank is gone
  if (end == "stopped") {
    host = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      std::atomic_ref<uint32_t>(own.page.given_up.value).store(1);
    });
  }
  run_kernel(world, rank, static_cast<unsigned>(dice()),
             end == "absent" ? kShortPatience : kLongPatience);
  if (host.joinable()) {
    host.join();
  }
  check(own, -1);
  CHECK(own.page.given_up.value == 1);
  if (end == "stopped") {
    CHECK(own.page.late.value == 0);
  } else {
    CHECK(LatePeer::peer(own.page.late.value) == n - 1);
    CHECK(LatePeer::block(own.page.late.value) < kBlocks);
  }
  run_kernel(world, rank, 0, kLongPatience);  // whatever follows does nothing, at once
  check(own, -1);
  run_in_order(own, 0);
  check(own, -1);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 5);
  const int n = std::stoi(argv[1]);
  const auto seed = static_cast<unsigned>(std::stoul(argv[2]));
  const int rounds = std::stoi(argv[3]);
  const std::string end = argv[4];
  World world(n);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.emplace_back([&, rank] { run_rank(world, rank, seed, rounds, end); });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  std::printf("world %d, seed %u, %d rounds, %s: fine\n", n, seed, rounds, end.c_str());
  return 0;
}
