// NCCL as a library found at run time. dpcore is not linked against it: a machine without it (or
// without a GPU) loads the module all the same, and a program that has several NCCLs sees which one
// is used.
//
// Looked for, in this order: the path in DPCORE_NCCL_LIBRARY; a libnccl.so.2 that the process has
// loaded already (torch's); the paths that the caller knows (the wheels nvidia-nccl-cu13 and
// -cu12); libnccl.so.2 where the system finds it. Loaded once per process and never unloaded.
//
// The prototypes are declared here, as far as they are used; their types are the library's own by
// layout. What came after 2.14 is optional: null where the library is older.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace dpcore::nccl {

struct Comm;  // the library's
using CommPtr = Comm*;
using Stream = void*;
using RedOp = int;

struct UniqueId {
  char bytes[128];
};

// As of 2.14, the oldest that is taken: newer libraries read what they know of it.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

enum Result : int {
  kSuccess = 0,
  kInProgress = 7,
};
enum Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};
enum BuiltinOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };
inline constexpr int kHostImmediate = 1;  // where the factor of a premultiplied sum lies

// X(result type, name, arguments)
#define DPCORE_NCCL_NEEDED(X)                                                      \
  X(int, GetVersion, (int*))                                                       \
  X(int, GetUniqueId, (UniqueId*))                                                 \
  X(int, CommInitRankConfig, (CommPtr*, int, UniqueId, int, Config*))              \
  X(int, CommFinalize, (CommPtr))                                                  \
  X(int, CommDestroy, (CommPtr))                                                   \
  X(int, CommAbort, (CommPtr))                                                     \
  X(int, CommGetAsyncError, (CommPtr, int*))                                       \
  X(const char*, GetErrorString, (int))                                            \
  X(const char*, GetLastError, (CommPtr))                                          \
  X(int, AllReduce, (const void*, void*, size_t, int, RedOp, CommPtr, Stream))     \
  X(int, Broadcast, (const void*, void*, size_t, int, int, CommPtr, Stream))       \
  X(int, Reduce, (const void*, void*, size_t, int, RedOp, int, CommPtr, Stream))   \
  X(int, AllGather, (const void*, void*, size_t, int, CommPtr, Stream))            \
  X(int, ReduceScatter, (const void*, void*, size_t, int, RedOp, CommPtr, Stream)) \
  X(int, Send, (const void*, size_t, int, int, CommPtr, Stream))                   \
  X(int, Recv, (void*, size_t, int, int, CommPtr, Stream))                         \
  X(int, GroupStart, ())                                                           \
  X(int, GroupEnd, ())                                                             \
  X(int, RedOpCreatePreMulSum, (RedOp*, void*, int, int, CommPtr))                 \
  X(int, RedOpDestroy, (RedOp, CommPtr))
#define DPCORE_NCCL_OPTIONAL(X)                          \
  X(int, CommRegister, (CommPtr, void*, size_t, void**)) \
  X(int, CommDeregister, (CommPtr, void*))

struct Library {
  std::string path;
  std::string found_by;  // "DPCORE_NCCL_LIBRARY", "already loaded", ...
  int version = 0;       // 22703 is 2.27.3

#define DPCORE_NCCL_MEMBER(type, name, arguments) type(*name) arguments = nullptr;
  DPCORE_NCCL_NEEDED(DPCORE_NCCL_MEMBER)
  DPCORE_NCCL_OPTIONAL(DPCORE_NCCL_MEMBER)
#undef DPCORE_NCCL_MEMBER

  // "NCCL 2.27.3 (/.../libnccl.so.2)"
  std::string describe() const;
};

// The first call decides which one; `wheels` are paths to look at. Throws Unsupported, listing
// every place and what was wrong there.
const Library& library(const std::vector<std::string>& wheels);

std::string version_text(int version);

}  // namespace dpcore::nccl
