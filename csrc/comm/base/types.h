// The vocabulary of the core: element types, reduction operators, collectives, and the parts that a
// buffer is cut into.
//
// Everything here is a value without memory of its own. Nothing in this file (or
// below it) knows torch, CUDA, threads or the network.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dpcore {

enum class DType : uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean, c64, c128 };
inline constexpr int kDTypeCount = 12;

enum class ReduceOp : uint8_t { sum, mean, prod, min, max, band, bor, bxor, premul_sum };
inline constexpr int kReduceOpCount = 9;

enum class Collective : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
};
inline constexpr int kCollectiveCount = 9;

// Inline, with what is asked of collectives below, as a small operation asks it many times.
constexpr size_t size_of(DType dtype) {
  constexpr std::array<uint8_t, kDTypeCount> kSizes{8, 4, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16};
  return kSizes[static_cast<size_t>(dtype)];
}
std::string_view name_of(DType dtype);
std::string_view name_of(ReduceOp op);
std::string_view name_of(Collective kind);

// Throws Unsupported and lists the valid names when `name` is none of them.
ReduceOp parse_reduce_op(std::string_view name);
DType parse_dtype(std::string_view name);
Collective parse_collective(std::string_view name);

// What a rank gives, or gets: nothing, a buffer of one size everywhere, its own part of one, or the
// parts of all ranks.
enum class Extent : uint8_t { nothing, whole, own_part, all_parts };

// What a collective is. Python reads this table as dpcore._C.collectives().
struct CollectiveTraits {
  std::string_view name;
  Extent gives;
  Extent gets;
  bool reduces = false;          // adds up what ranks bring
  bool comes_from_root = false;  // only the root gives
  bool goes_to_root = false;     // only the root gets
};
inline constexpr std::array<CollectiveTraits, kCollectiveCount> kCollectives{{
    {.name = "all_reduce", .gives = Extent::whole, .gets = Extent::whole, .reduces = true},
    {.name = "reduce_scatter",
     .gives = Extent::all_parts,
     .gets = Extent::own_part,
     .reduces = true},
    {.name = "all_gather", .gives = Extent::own_part, .gets = Extent::all_parts},
    {.name = "broadcast", .gives = Extent::whole, .gets = Extent::whole, .comes_from_root = true},
    {.name = "reduce",
     .gives = Extent::whole,
     .gets = Extent::whole,
     .reduces = true,
     .goes_to_root = true},
    {.name = "gather", .gives = Extent::own_part, .gets = Extent::all_parts, .goes_to_root = true},
    {.name = "scatter",
     .gives = Extent::all_parts,
     .gets = Extent::own_part,
     .comes_from_root = true},
    {.name = "all_to_all", .gives = Extent::all_parts, .gets = Extent::all_parts},
    {.name = "barrier", .gives = Extent::nothing, .gets = Extent::nothing},
}};
constexpr const CollectiveTraits& traits_of(Collective kind) {
  return kCollectives[static_cast<size_t>(kind)];
}
constexpr bool reduces(Collective kind) { return traits_of(kind).reduces; }
constexpr bool comes_from_root(Collective kind) { return traits_of(kind).comes_from_root; }
constexpr bool goes_to_root(Collective kind) { return traits_of(kind).goes_to_root; }
constexpr bool has_root(Collective kind) { return comes_from_root(kind) || goes_to_root(kind); }
// Whether all ranks have all of one buffer. Of other collectives each has a part.
constexpr bool is_on_whole(Collective kind) { return traits_of(kind).gives == Extent::whole; }
// Whether each rank gives a part to each.
constexpr bool splits(Collective kind) { return traits_of(kind).gives == Extent::all_parts; }
// Whether what a rank gets has a part of each.
constexpr bool joins(Collective kind) { return traits_of(kind).gets == Extent::all_parts; }

// Whether `op` has a meaning for `dtype`: no order on complex numbers, no bits in floating point,
// no mean of booleans, no factors for integers. The mean of integers is their sum, which wraps as
// any other sum, divided by the number of ranks and rounded toward zero.
constexpr bool is_valid(ReduceOp op, DType dtype) {
  const bool is_bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  const bool is_scaled = op == ReduceOp::mean || op == ReduceOp::premul_sum;
  switch (dtype) {
    case DType::f64:
    case DType::f32:
    case DType::f16:
    case DType::bf16:
      return !is_bitwise;
    case DType::c64:
    case DType::c128:
      return op == ReduceOp::sum || op == ReduceOp::prod || is_scaled;
    case DType::i64:
    case DType::i32:
    case DType::i16:
    case DType::i8:
    case DType::u8:
      return op != ReduceOp::premul_sum;
    case DType::boolean:
      return !is_scaled;
  }
  return false;
}

// Whether elements can be multiplied by a factor: floating-point and complex types.
constexpr bool takes_factors(DType dtype) { return is_valid(ReduceOp::premul_sum, dtype); }

// The bounds [begin, end) of chunk `index` when `count` elements are cut in `chunks` nearly
// equal parts: the first count % chunks parts have one element more.
struct ElementRange {
  size_t begin = 0;
  size_t end = 0;
  size_t size() const { return end - begin; }
};
inline ElementRange chunk_range(size_t count, int chunks, int index) {
  const size_t parts = static_cast<size_t>(chunks);
  const size_t position = static_cast<size_t>(index);
  const size_t shorter = count / parts;
  const size_t longer_parts = count % parts;
  const size_t begin = position * shorter + std::min(position, longer_parts);
  return {begin, begin + shorter + (position < longer_parts ? 1 : 0)};
}

}  // namespace dpcore
