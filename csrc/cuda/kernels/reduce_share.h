// The n-ary reduction of comm/reduce as many workers do it at once: a worker is a thread of a
// GPU, or one turn of a loop on the host.
//
// Memory is cut in packs of 16 bytes, the widest access there is, from the first boundary that
// all arrays reach together; workers take packs in turns, so that neighbours read neighbouring
// memory. Elements before and behind the packs are taken one by one, and all of them are when the
// arrays reach no boundary together. An element is read from all inputs, in order, and written to
// all outputs by one worker: outputs may be inputs, and the result does not depend on how many
// workers there are.
#pragma once

#include "cuda/kernels/element.h"

namespace dpcore {

inline constexpr size_t kPackBytes = 16;
inline constexpr int kMaxOperands = 64;  // arguments of a kernel are at most 4 KiB

// Checked and lowered, as it is handed to every worker by value.
struct ReduceShares {
  const void* in[kMaxOperands];
  void* out[kMaxOperands];
  double pre[kMaxOperands];
  double post;
  uint32_t divisor;  // of integers
  ReduceOp op;
  int n_in;
  int n_out;
  bool has_pre;
  size_t count;  // elements
  size_t head;   // elements before the first pack
  size_t packs;
};

namespace element {

struct alignas(kPackBytes) Pack {
  uint32_t words[4];
};

// kAtOnce: packs that one worker has in flight, loads that do not wait for each other.
template <class Format, class Op, int kAtOnce>
struct Reducer {
  using Stored = typename Format::Stored;
  using Acc = typename Format::Acc;
  static constexpr int kLanes = kPackBytes / sizeof(Stored);

  static DPCORE_BOTH Acc loaded(const ReduceShares& job, int input, Stored x) {
    const Acc value = Format::load(x);
    if constexpr (Format::kIsFloat) {
      if (job.has_pre) {
        return scaled(value, job.pre[input]);
      }
    }
    return value;
  }
  static DPCORE_BOTH Stored finished(const ReduceShares& job, Acc acc) {
    if constexpr (Format::kIsFloat) {
      return Format::store(canonical(scaled(acc, job.post)));
    } else {
      return Format::store(job.divisor == 1 ? acc : divided(acc, job.divisor));
    }
  }

  static DPCORE_BOTH void one(const ReduceShares& job, size_t i) {
    Acc acc = loaded(job, 0, static_cast<const Stored*>(job.in[0])[i]);
    for (int k = 1; k < job.n_in; ++k) {
      acc = Op::apply(job.op, acc, loaded(job, k, static_cast<const Stored*>(job.in[k])[i]));
    }
    const Stored result = finished(job, acc);
    for (int k = 0; k < job.n_out; ++k) {
      static_cast<Stored*>(job.out[k])[i] = result;
    }
  }

  // kCount packs, `stride` packs apart.
  template <int kCount>
  static DPCORE_BOTH void load(const ReduceShares& job, int input, size_t first, size_t stride,
                               Acc (&x)[kCount][kLanes]) {
    const char* in = static_cast<const char*>(job.in[input]) + job.head * sizeof(Stored);
    Pack pack[kCount];
    DPCORE_UNROLL
    for (int p = 0; p < kCount; ++p) {
      pack[p] = *reinterpret_cast<const Pack*>(in + (first + p * stride) * kPackBytes);
    }
    DPCORE_UNROLL
    for (int p = 0; p < kCount; ++p) {
      Stored lanes[kLanes];
      memcpy(lanes, &pack[p], kPackBytes);
      DPCORE_UNROLL
      for (int lane = 0; lane < kLanes; ++lane) {
        x[p][lane] = loaded(job, input, lanes[lane]);
      }
    }
  }

  template <int kCount>
  static DPCORE_BOTH void packs(const ReduceShares& job, size_t first, size_t stride) {
    Acc acc[kCount][kLanes];
    load<kCount>(job, 0, first, stride, acc);
    for (int k = 1; k < job.n_in; ++k) {
      Acc x[kCount][kLanes];
      load<kCount>(job, k, first, stride, x);
      DPCORE_UNROLL
      for (int p = 0; p < kCount; ++p) {
        DPCORE_UNROLL
        for (int lane = 0; lane < kLanes; ++lane) {
          acc[p][lane] = Op::apply(job.op, acc[p][lane], x[p][lane]);
        }
      }
    }
    DPCORE_UNROLL
    for (int p = 0; p < kCount; ++p) {
      Stored lanes[kLanes];
      DPCORE_UNROLL
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = finished(job, acc[p][lane]);
      }
      Pack pack;
      memcpy(&pack, lanes, kPackBytes);
      for (int k = 0; k < job.n_out; ++k) {
        char* out = static_cast<char*>(job.out[k]) + job.head * sizeof(Stored);
        *reinterpret_cast<Pack*>(out + (first + p * stride) * kPackBytes) = pack;
      }
    }
  }

  static DPCORE_BOTH void run(const ReduceShares& job, size_t worker, size_t workers) {
    size_t at = worker;
    if constexpr (kAtOnce > 1) {
      for (; at + (kAtOnce - 1) * workers < job.packs; at += kAtOnce * workers) {
        packs<kAtOnce>(job, at, workers);
      }
    }
    for (; at < job.packs; at += workers) {
      packs<1>(job, at, workers);
    }
    const size_t inside = job.packs * kLanes;
    for (size_t i = worker; i < job.count - inside; i += workers) {
      one(job, i < job.head ? i : i + inside);
    }
  }
};

}  // namespace element
}  // namespace dpcore
