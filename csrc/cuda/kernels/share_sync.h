// How a kernel works on memory that other ranks also access: the functions that every worker of it
// runs, on the GPU and, for tests and for devices of the host, as ordinary code.
//
// There are two policies. StreamOrder: the stream waits for the other ranks before the kernel and
// signals them after it. The kernel only checks whether the communicator was given up, and then
// touches nothing. It waits for no other kernel, so ranks can share a GPU. InKernelBarrier: the
// kernel itself waits, if each rank has its own GPU: each block has a barrier with the blocks of
// the same index on all ranks, before and after its work, and no other synchronisation is needed.
//
// A barrier. Every rank has a signal pad in the memory of its device. To arrive, a block writes its
// number of this barrier on the pads of all others (release, for the whole system: what its kernel
// and all before it wrote is visible to the rank that reads the number), then waits until theirs
// stand on its own pad (acquire). Numbers grow by one for each barrier of the block and are
// compared around 2^32. They are counted on the pad itself: a captured graph has new numbers at
// each replay.
//
// A wait ends when the other block arrives, when the host gives up (a word on the host, which is
// slow to read and so checked seldom), or when patience ends: then the kernel writes the late rank
// to another word and gives up, and all later work on this pad does nothing.
//
// Memory: the pad is its rank's, written by the kernels of its peers; the two words lie in the
// rank's page of flags on the host. Blocks of one kernel must be able to run at the same time as
// their counterparts: there are few of them.
#pragma once

#include "cuda/kernels/reduce_share.h"

#if !defined(__CUDA_ARCH__)
#include <sched.h>
#include <time.h>
#endif

namespace dpcore {

inline constexpr int kBarrierRanks = kMaxOperands;
inline constexpr int kBarrierBlocks = 32;

// What the blocks of a kernel know of the host's word `given_up`. A GPU reads such a word about
// once per microsecond, however many blocks ask for it: so the block that comes first reads it, and
// the others hear from it. Zero before the first kernel; kernels leave it as they found it.
struct HostAnswer {
  uint32_t came;   // how many blocks of the kernel have come
  uint32_t says;   // what the first one has read: kUnknown until then
  uint32_t heard;  // how many blocks have read this

  static constexpr uint32_t kUnknown = 0;
  static constexpr uint32_t kGoOn = 1;
  static constexpr uint32_t kGivenUp = 2;
};

struct SignalPad {
  uint32_t arrived[kBarrierBlocks]
                  [kBarrierRanks];  // numbers, by block and by the rank that wrote it
  uint32_t rounds[kBarrierBlocks];  // the own block's, written by it alone
  HostAnswer answer;                // the own rank's
};

// The word `late`: the rank for which a kernel has waited long. 0: none.
struct LatePeer {
  static DPCORE_BOTH uint32_t of(int peer, int block) {
    return static_cast<uint32_t>(block) << 8 | static_cast<uint32_t>(peer + 1);
  }
  static int peer(uint32_t word) { return static_cast<int>(word & 0xffu) - 1; }
  static int block(uint32_t word) { return static_cast<int>(word >> 8); }
};

struct ShareSync {
  uint32_t* given_up = nullptr;  // null: no rank can
  HostAnswer* answer = nullptr;  // of the own pad
  // For InKernelBarrier:
  uint32_t* late = nullptr;
  SignalPad* pads[kBarrierRanks] = {};  // by rank
  uint64_t patience_ns = 0;
  int rank = 0;
  int world = 1;
  int blocks = 1;  // the same on all ranks
  bool enters = false;
  bool leaves = false;
  bool has_barrier() const { return enters || leaves; }
};

namespace element {

// ---- words that others read and write -----------------------------------------------------------

DPCORE_BOTH uint32_t look_at(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

DPCORE_BOTH void publish(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

// Each of `count` callers gets another number, from 0 on; the next ones begin anew.
DPCORE_BOTH uint32_t next_turn(uint32_t* word, uint32_t count) {
#if defined(__CUDA_ARCH__)
  return atomicInc(word, count - 1);
#else
  uint32_t turn = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &turn, turn + 1 == count ? 0 : turn + 1, true,
                                      __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
  return turn;
#endif
}

// Of all memory that this worker wrote; the barrier of the block carries it to the worker that
// publishes.
DPCORE_BOTH void fence_for_system() {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#endif
}

DPCORE_BOTH uint64_t clock_ns() {
#if defined(__CUDA_ARCH__)
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
#endif
}

DPCORE_BOTH void rest() {
#if defined(__CUDA_ARCH__)
  __nanosleep(40);
#else
  sched_yield();
#endif
}

DPCORE_BOTH bool has_reached(uint32_t value, uint32_t number) {
  return static_cast<int32_t>(value - number) >= 0;
}

// ---- policies -----------------------------------------------------------------------------------
// Block: thread(), threads(), index(), blocks(), and all(x): every thread comes, whether all say
// so.

// Asked by one thread of each block; the others of the block say yes.
template <class Block>
DPCORE_BOTH bool is_wanted(const ShareSync& sync, Block& block) {
  if (block.thread() != 0) {
    return true;
  }
  const auto blocks = static_cast<uint32_t>(block.blocks());
  if (blocks == 1) {
    return look_at(sync.given_up) == 0;
  }
  HostAnswer& answer = *sync.answer;
  if (next_turn(&answer.came, blocks) == 0) {
    const bool goes_on = look_at(sync.given_up) == 0;
    publish(&answer.says, goes_on ? HostAnswer::kGoOn : HostAnswer::kGivenUp);
  }
  uint32_t says = look_at(&answer.says);
  for (; says == HostAnswer::kUnknown; says = look_at(&answer.says)) {
    rest();
  }
  if (next_turn(&answer.heard, blocks) == blocks - 1) {
    publish(&answer.says, HostAnswer::kUnknown);
  }
  return says == HostAnswer::kGoOn;
}

struct StreamOrder {
  template <class Block>
  static DPCORE_BOTH bool enter(const ShareSync& sync, Block& block) {
    return sync.given_up == nullptr || block.all(is_wanted(sync, block));
  }
  template <class Block>
  static DPCORE_BOTH void leave(const ShareSync&, Block&) {}
};

struct InKernelBarrier {
  static constexpr uint32_t kPolls = 64;            // at the pad, between two at the host's words
  static constexpr uint64_t kPartBeforeSaying = 4;  // it names the late rank after 1/4 of patience

  static DPCORE_BOTH bool arrives(const ShareSync& sync, int peer, int block, uint32_t number,
                                  uint64_t begin) {
    const uint32_t* word = &sync.pads[sync.rank]->arrived[block][peer];
    bool said = false;
    for (uint32_t polls = 1; !has_reached(look_at(word), number); ++polls) {
      if (polls % kPolls == 0) {
        if (look_at(sync.given_up) != 0) {
          return false;
        }
        const uint64_t waited = clock_ns() - begin;
        if (!said && waited > sync.patience_ns / kPartBeforeSaying) {
          publish(sync.late, LatePeer::of(peer, block));
          said = true;
        }
        if (waited > sync.patience_ns) {
          publish(sync.given_up, 1);
          return false;
        }
      }
      rest();
    }
    if (said && look_at(sync.given_up) == 0) {
      publish(sync.late, 0);
    }
    return true;
  }

  template <class Block>
  static DPCORE_BOTH bool wait_for_peers(const ShareSync& sync, Block& block, uint32_t number) {
    const int own = block.index();
    for (int p = block.thread(); p < sync.world; p += block.threads()) {
      if (p != sync.rank) {
        publish(&sync.pads[p]->arrived[own][sync.rank], number);
      }
    }
    const uint64_t begin = clock_ns();
    bool all_came = true;
    for (int p = block.thread(); p < sync.world; p += block.threads()) {
      if (p != sync.rank) {
        all_came = arrives(sync, p, own, number, begin) && all_came;
      }
    }
    return block.all(all_came);
  }

  template <class Block>
  static DPCORE_BOTH bool enter(const ShareSync& sync, Block& block) {
    if (!block.all(is_wanted(sync, block))) {
      return false;
    }
    if (!sync.enters) {
      return true;
    }
    uint32_t* rounds = &sync.pads[sync.rank]->rounds[block.index()];
    const uint32_t number = *rounds + 1;
    const bool came =
        wait_for_peers(sync, block, number);  // behind it all threads have read the number
    if (block.thread() == 0) {
      *rounds = number;
    }
    return came;
  }

  template <class Block>
  static DPCORE_BOTH void leave(const ShareSync& sync, Block& block) {
    if (!sync.leaves) {
      return;
    }
    fence_for_system();
    block.all(true);  // everything is written, and the number as well
    uint32_t* rounds = &sync.pads[sync.rank]->rounds[block.index()];
    const uint32_t number = *rounds + 1;
    wait_for_peers(sync, block, number);
    if (block.thread() == 0) {
      *rounds = number;
    }
  }
};

// What one worker does of a kernel.
template <class Reducer, class Policy, class Block>
DPCORE_BOTH void run_share(const ReduceShares& job, const ShareSync& sync, Block& block) {
  if (!Policy::enter(sync, block)) {
    return;
  }
  const auto threads = static_cast<size_t>(block.threads());
  Reducer::run(job, static_cast<size_t>(block.index()) * threads + block.thread(),
               static_cast<size_t>(block.blocks()) * threads);
  Policy::leave(sync, block);
}

// A block of one worker.
class LoneBlock {
 public:
  LoneBlock(int index, int blocks) : index_(index), blocks_(blocks) {}
  int thread() const { return 0; }
  int threads() const { return 1; }
  int index() const { return index_; }
  int blocks() const { return blocks_; }
  bool all(bool says) const { return says; }

 private:
  int index_;
  int blocks_;
};

}  // namespace element
}  // namespace dpcore
