// Copies between many small tensors and one flat buffer, as many workers do it at once: the
// gradients of a bucket in one launch instead of one each.
//
// A part is one tensor: where it lies by itself and from which byte on in the flat buffer. Each
// part gets as many *blocks* of kBlockElements as it needs; a group of workers (a thread block of
// the GPU, one turn of a loop on the host) finds the part of its block by bisection. All parts and
// the flat buffer have one type each; 16- and 32-bit floats are cast into each other, a factor is
// multiplied in float32.
//
// The list travels as the argument of the kernel, so nothing has to be copied to the device
// before, and a captured graph carries it along.
#pragma once

#include "cuda/kernels/element.h"

namespace dpcore {

inline constexpr int kMaxParts = 1024;  // 24 KiB: arguments may have 32,764 bytes from CUDA 12.1 on
inline constexpr size_t kBlockElements = 8192;

enum class Cast : uint8_t { none, f32, f16, bf16 };  // none: bytes as they are

struct PartList {
  void* parts[kMaxParts];
  uint64_t flat_bytes[kMaxParts];       // offset of the part in the flat buffer
  uint32_t first_block[kMaxParts + 1];  // and of the one after the last
  uint32_t elements[kMaxParts];
  int count;
  char* flat;
  Cast part_type;
  Cast flat_type;
  uint8_t bytes;  // of an element, where nothing is cast
  bool to_flat;
  float factor;
};

namespace element {

DPCORE_BOTH int part_of_block(const PartList& list, uint32_t block) {
  int low = 0;
  int high = list.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (list.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Four reads before the first write: a worker that waits for each would leave the memory idle.
template <class T>
DPCORE_BOTH void copy_elements(T* to, const T* from, size_t n, size_t worker, size_t workers) {
  size_t i = worker;
  for (; i + 3 * workers < n; i += 4 * workers) {
    const T a = from[i];
    const T b = from[i + workers];
    const T c = from[i + 2 * workers];
    const T d = from[i + 3 * workers];
    to[i] = a;
    to[i + workers] = b;
    to[i + 2 * workers] = c;
    to[i + 3 * workers] = d;
  }
  for (; i < n; i += workers) {
    to[i] = from[i];
  }
}

struct alignas(16) Sixteen {
  uint64_t words[2];
};

// Whole packs where both sides are aligned to them.
DPCORE_BOTH void copy_bytes_of(char* to, const char* from, size_t n, size_t worker,
                               size_t workers) {
  const auto unaligned = (bits_as<uintptr_t>(to) | bits_as<uintptr_t>(from)) % sizeof(Sixteen);
  size_t done = 0;
  if (unaligned == 0) {
    const size_t packs = n / sizeof(Sixteen);
    copy_elements(reinterpret_cast<Sixteen*>(to), reinterpret_cast<const Sixteen*>(from), packs,
                  worker, workers);
    done = packs * sizeof(Sixteen);
  } else if (unaligned % 4 == 0) {
    copy_elements(reinterpret_cast<uint32_t*>(to), reinterpret_cast<const uint32_t*>(from), n / 4,
                  worker, workers);
    done = n / 4 * 4;
  }
  copy_elements(to + done, from + done, n - done, worker, workers);
}

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T values[4];
};

template <class To, class From>
DPCORE_BOTH typename To::Stored cast_one(typename From::Stored value, float factor) {
  return To::store(canonical(From::load(value) * factor));
}

// Four at a time where both sides are aligned to them.
template <class To, class From>
DPCORE_BOTH void cast_elements(char* to, const char* from, float factor, size_t n, size_t worker,
                               size_t workers) {
  using Out = Four<typename To::Stored>;
  using In = Four<typename From::Stored>;
  size_t done = 0;
  if (bits_as<uintptr_t>(to) % sizeof(Out) == 0 && bits_as<uintptr_t>(from) % sizeof(In) == 0) {
    auto* out = reinterpret_cast<Out*>(to);
    const auto* in = reinterpret_cast<const In*>(from);
    for (size_t i = worker; i < n / 4; i += workers) {
      const In read = in[i];
      Out cast;
      for (int k = 0; k < 4; ++k) {
        cast.values[k] = cast_one<To, From>(read.values[k], factor);
      }
      out[i] = cast;
    }
    done = n / 4 * 4;
  }
  auto* out = reinterpret_cast<typename To::Stored*>(to);
  const auto* in = reinterpret_cast<const typename From::Stored*>(from);
  for (size_t i = done + worker; i < n; i += workers) {
    out[i] = cast_one<To, From>(in[i], factor);
  }
}

template <class To>
DPCORE_BOTH void cast_from(Cast type, char* to, const char* from, float factor, size_t n,
                           size_t worker, size_t workers) {
  if (type == Cast::f32) {
    cast_elements<To, Plain<float>>(to, from, factor, n, worker, workers);
  }
  if (type == Cast::f16) {
    cast_elements<To, Float16>(to, from, factor, n, worker, workers);
  }
  if (type == Cast::bf16) {
    cast_elements<To, BFloat16>(to, from, factor, n, worker, workers);
  }
}

DPCORE_BOTH size_t bytes_of(Cast type, const PartList& list) {
  return type == Cast::none ? list.bytes : type == Cast::f32 ? 4 : 2;
}

// The share of one worker of the `workers` that have this block.
DPCORE_BOTH void copy_block(const PartList& list, uint32_t block, size_t worker, size_t workers) {
  const int part = part_of_block(list, block);
  const size_t begin = (block - list.first_block[part]) * kBlockElements;
  const size_t rest = list.elements[part] - begin;
  const size_t n = rest < kBlockElements ? rest : kBlockElements;
  char* own = static_cast<char*>(list.parts[part]) + begin * bytes_of(list.part_type, list);
  char* flat = list.flat + list.flat_bytes[part] + begin * bytes_of(list.flat_type, list);
  char* to = list.to_flat ? flat : own;
  const char* from = list.to_flat ? own : flat;
  const Cast to_type = list.to_flat ? list.flat_type : list.part_type;
  const Cast from_type = list.to_flat ? list.part_type : list.flat_type;
  if (to_type == Cast::none) {
    copy_bytes_of(to, from, n * list.bytes, worker, workers);
  } else if (to_type == Cast::f32) {
    cast_from<Plain<float>>(from_type, to, from, list.factor, n, worker, workers);
  } else if (to_type == Cast::f16) {
    cast_from<Float16>(from_type, to, from, list.factor, n, worker, workers);
  } else {
    cast_from<BFloat16>(from_type, to, from, list.factor, n, worker, workers);
  }
}

}  // namespace element
}  // namespace dpcore
