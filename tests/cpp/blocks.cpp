// Threads take blocks of the warm pool and give them back, to each other too, while windows end: a
// block is one thread's at a time, has the size that was asked for, and nothing is lost.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "tensors/warm_pool.h"

using namespace dpcore;

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kThreads = 4;
constexpr int kRounds = 300;

struct Held {
  std::byte* begin = nullptr;
  size_t bytes = 0;
  std::byte mark{};
};

void fill(const Held& held) {
  held.begin[0] = held.begin[held.bytes / 2] = held.begin[held.bytes - 1] = held.mark;
}

void check_and_give_back(WarmPool& pool, const Held& held, bool keep) {
  CHECK(pool.has(held.begin));
  CHECK(held.begin[0] == held.mark);
  CHECK(held.begin[held.bytes / 2] == held.mark);
  CHECK(held.begin[held.bytes - 1] == held.mark);
  pool.give_back(held.begin, keep);
}

struct Exchange {  // blocks that one thread leaves to another
  std::mutex mutex;
  std::vector<Held> all;
};

void work(WarmPool& pool, Exchange& exchange, int number) {
  std::mt19937 dice(number);
  std::vector<Held> mine;
  for (int round = 0; round < kRounds; ++round) {
    Held held;
    held.bytes = kMiB + dice() % (8 * kMiB);
    held.begin = static_cast<std::byte*>(pool.take(held.bytes));
    held.mark = static_cast<std::byte>(number * 64 + round % 64);
    CHECK(held.begin != nullptr);
    CHECK(reinterpret_cast<uintptr_t>(held.begin) % (2 * kMiB) == 0);
    fill(held);
    mine.push_back(held);
    if (mine.size() > 3) {
      const size_t which = dice() % mine.size();
      const Held out = mine[which];
      mine.erase(mine.begin() + static_cast<ptrdiff_t>(which));
      if (dice() % 2 == 0) {
        check_and_give_back(pool, out, dice() % 8 != 0);
      } else {
        const std::lock_guard<std::mutex> lock(exchange.mutex);
        exchange.all.push_back(out);
      }
    }
    if (dice() % 4 == 0) {
      std::vector<Held> others;
      {
        const std::lock_guard<std::mutex> lock(exchange.mutex);
        others.swap(exchange.all);
      }
      for (const Held& held : others) {
        check_and_give_back(pool, held, true);
      }
    }
    if (dice() % 16 == 0) {
      pool.end_window();
    }
  }
  for (const Held& held : mine) {
    check_and_give_back(pool, held, true);
  }
}

void threads_share_the_pool() {
  WarmPool pool(size_t{1} << 32);
  Exchange exchange;
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back(work, std::ref(pool), std::ref(exchange), number);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Held& held : exchange.all) {
    check_and_give_back(pool, held, true);
  }
  CHECK(pool.figures().used == 0);
  CHECK(pool.figures().warm > 0);
  pool.release_kept();
  CHECK(pool.figures().kept == 0);
}

// Also one that is no more than an eighth larger than it has to be.
void sizes_are_enough_and_not_too_much() {
  WarmPool pool(size_t{1} << 36);
  for (size_t bytes = kMiB; bytes < 512 * kMiB; bytes += bytes / 7 + 1) {
    void* block = pool.take(bytes);
    CHECK(block != nullptr);
    CHECK(pool.figures().used >= bytes);
    CHECK(pool.figures().used <= bytes + bytes / 8 + 1);
    pool.give_back(block, false);
  }
  CHECK(pool.take(size_t{1} << 40) == nullptr);
  CHECK(pool.figures().used == 0);
}

}  // namespace

int main() {
  sizes_are_enough_and_not_too_much();
  threads_share_the_pool();
  std::puts("blocks: fine");
  return 0;
}
