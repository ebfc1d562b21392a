// Names of element types, operators and collectives.
#include "comm/base/types.h"

#include <array>
#include <string>

#include "comm/base/error.h"

namespace dpcore {
namespace {

struct DTypeInfo {
  std::string_view name;
  std::string_view short_name;
};

// In the order of the enum.
constexpr std::array<DTypeInfo, kDTypeCount> kDTypes{{
    {"float64", "f64"},
    {"float32", "f32"},
    {"float16", "f16"},
    {"bfloat16", "bf16"},
    {"int64", "i64"},
    {"int32", "i32"},
    {"int16", "i16"},
    {"int8", "i8"},
    {"uint8", "u8"},
    {"bool", "boolean"},
    {"complex64", "c64"},
    {"complex128", "c128"},
}};

constexpr std::array<std::string_view, kReduceOpCount> kReduceOps{
    "sum", "mean", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"};

// The value that has this name, of so many. `what`: of which enum, in messages.
template <class Enum>
Enum parse(std::string_view what, std::string_view name, int count) {
  for (int i = 0; i < count; ++i) {
    if (name_of(static_cast<Enum>(i)) == name) {
      return static_cast<Enum>(i);
    }
  }
  std::string message = "unknown " + std::string(what) + " \"" + std::string(name) + "\": use ";
  for (int i = 0; i < count; ++i) {
    message += (i == 0 ? "" : i + 1 == count ? " or " : ", ");
    message += name_of(static_cast<Enum>(i));
  }
  throw Unsupported(message);
}

}  // namespace

std::string_view name_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

std::string_view name_of(ReduceOp op) { return kReduceOps[static_cast<size_t>(op)]; }

std::string_view name_of(Collective kind) { return traits_of(kind).name; }

ReduceOp parse_reduce_op(std::string_view name) {
  if (name == "avg") {
    return ReduceOp::mean;
  }
  if (name == "product") {
    return ReduceOp::prod;
  }
  return parse<ReduceOp>("reduction", name, kReduceOpCount);
}

DType parse_dtype(std::string_view name) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].short_name == name) {
      return static_cast<DType>(i);
    }
  }
  return parse<DType>("element type", name, kDTypeCount);
}

Collective parse_collective(std::string_view name) {
  return parse<Collective>("collective", name, kCollectiveCount);
}

}  // namespace dpcore
