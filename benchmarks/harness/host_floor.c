// An all-reduce of two processes of a machine, and nothing else: what it takes at the least here,
// to which benchmarks.floors holds dpcore's. Both processes call the same function at once.
//
// meet      both raise a number and see the other's: how far the two processors are apart
// mapped    each adds its half of two buffers that both have mapped, and writes it to both
// ordinary  nobody sees the other's buffer: each copies the other's half into its stage, which both
//           have mapped, where the other adds its own to it, and copies the result back. A line
//           of the stage so goes to the other processor and comes back, and is asked for ahead
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// A line of a cache, at any address.
typedef float Line __attribute__((vector_size(64), aligned(4), may_alias));

enum {
  kLine = 16,    // floats
  kAhead = 512,  // floats
  kBuffers = 4,  // of a stage
  kPollsBeforeYield = 2000
};

// Of a rank: the last part that it has given to the other, and that it has added for both.
typedef struct {
  _Alignas(128) _Atomic uint64_t given;
  _Alignas(128) _Atomic uint64_t added;
} Progress;

// Where the other process has no processor, it gets this one's.
static void wait_for(_Atomic uint64_t* number, uint64_t wanted) {
  for (unsigned polls = 1; atomic_load_explicit(number, memory_order_acquire) < wanted; ++polls) {
    if (polls % kPollsBeforeYield == 0) {
      sched_yield();
    } else {
      __builtin_ia32_pause();
    }
  }
}

static void tell(_Atomic uint64_t* number, uint64_t value) {
  atomic_store_explicit(number, value, memory_order_release);
}

static void add_to_both(float* mine, float* theirs, size_t count) {
  for (size_t i = 0; i < count; i += kLine) {
    __builtin_prefetch(theirs + i + kAhead, 1);
    const Line sum = *(Line*)(mine + i) + *(Line*)(theirs + i);
    *(Line*)(mine + i) = sum;
    *(Line*)(theirs + i) = sum;
  }
}

static void take_back(float* to, const float* from, size_t count) {
  for (size_t i = 0; i < count; i += kLine) {
    __builtin_prefetch(from + i + kAhead, 1);
    *(Line*)(to + i) = *(const Line*)(from + i);
  }
}

// `number`: of this call, from 1 on.
void meet(Progress* progress, int rank, uint64_t number) {
  tell(&progress[rank].given, number);
  wait_for(&progress[1 - rank].given, number);
}

// `count`: floats, a multiple of 32.
void mapped(Progress* progress, int rank, uint64_t number, float* const* buffers, size_t count) {
  meet(progress, rank, number);
  const size_t half = count / 2;
  add_to_both(buffers[rank] + rank * half, buffers[1 - rank] + rank * half, half);
  tell(&progress[rank].added, number);
  wait_for(&progress[1 - rank].added, number);
}

// In so many parts, each of which goes through a buffer of the stage. `number`: of the first part.
void ordinary(Progress* progress, int rank, uint64_t number, float* data, float* const* stages,
              size_t count, size_t parts) {
  const size_t half = count / parts / 2;
  const int other = 1 - rank;
  for (size_t turn = 0; turn < parts + 2; ++turn) {
    if (turn < parts) {
      float* buffer = stages[rank] + turn % kBuffers * half;
      memcpy(buffer, data + (2 * turn + other) * half, half * sizeof(float));
      tell(&progress[rank].given, number + turn);
    }
    if (turn >= 1 && turn <= parts) {
      const size_t part = turn - 1;
      wait_for(&progress[other].given, number + part);
      add_to_both(data + (2 * part + rank) * half, stages[other] + part % kBuffers * half, half);
      tell(&progress[rank].added, number + part);
    }
    if (turn >= 2) {
      const size_t part = turn - 2;
      wait_for(&progress[other].added, number + part);
      take_back(data + (2 * part + other) * half, stages[rank] + part % kBuffers * half, half);
    }
  }
}
