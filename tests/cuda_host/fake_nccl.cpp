// A stand-in for libnccl.so.2, for ranks that are threads of one process and devices whose memory
// is the host's (csrc/cuda/device/device_host.h). It keeps NCCL's rules where breaking them would
// hang or corrupt on a GPU: work happens in the stream, later; collectives wait for every rank and
// messages for the other side; an abort ends what waits; a non-blocking communicator may answer "in
// progress". It adds in rank order, in double precision, with code of its own.
//
// Tests steer it, and read what was called, through the functions at the end; FAKE_NCCL_VERSION is
// what it says it is.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fake_nccl_elements.h"
#include "fake_nccl_ranks.h"

using namespace fake;
using dpcore::nccl::Comm;
using dpcore::nccl::Config;
using dpcore::nccl::UniqueId;

namespace {

int answer() {
  if (g_progress_polls.load() == 0 || t_depth > 0) {
    return kSuccess;
  }
  g_polls_left.store(g_progress_polls.load());
  return kInProgress;
}

Arrival arrival_of(Comm* comm, const void* in, void* out, int op) {
  if (op < kFirstOwnOp) {
    return {in, out, op, 1.0};
  }
  return {in, out, nccl::kSum, comm->own_ops.at(op)};
}

std::vector<Operand> operands_of(const std::vector<Arrival>& all, size_t offset) {
  std::vector<Operand> operands;
  for (const Arrival& one : all) {
    operands.push_back({static_cast<const std::byte*>(one.in) + offset, one.op, one.factor});
  }
  return operands;
}

// As NCCL, which ends a communicator after the last graph that has captured its work. One that had
// to wait is not deleted: no thread sanitizer sees that the graph is gone.
void end(Comm* comm) {
  if (comm->work.use_count() == 1) {
    delete comm;
    return;
  }
  while (comm->work.use_count() > 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string numbers(size_t count, int type) {
  return std::to_string(count) + " x " + std::to_string(type);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int ncclGetVersion(int* version) {
  const char* wish = std::getenv("FAKE_NCCL_VERSION");
  *version = wish != nullptr ? std::atoi(wish) : 22703;
  return kSuccess;
}

EXPORT int ncclGetUniqueId(UniqueId* id) {
  const int failure = called("GetUniqueId", 0, "");
  std::memset(id, 0, sizeof(*id));
  const std::string text = "rendezvous " + std::to_string(g_ids++);
  text.copy(id->bytes, sizeof(id->bytes) - 1);
  return failure;
}

EXPORT int ncclCommInitRankConfig(Comm** comm, int ranks, UniqueId id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->size < 20) {
    return kInvalidArgument;
  }
  const char* algorithm = std::getenv("NCCL_ALGO");
  const int failure = called("CommInitRankConfig", rank,
                             std::to_string(ranks) + " " + (algorithm ? algorithm : "-"));
  if (failure != kSuccess) {
    return failure;
  }
  *comm = new Comm;
  (*comm)->rank = rank;
  const std::lock_guard<std::mutex> lock(g_mutex);
  auto& world = g_worlds[id.bytes];
  if (!world) {
    world = std::make_shared<World>(ranks);
  }
  (*comm)->world = world;
  const std::lock_guard<std::mutex> inside(world->mutex);
  if (++world->joined == ranks) {
    g_worlds.erase(id.bytes);
  }
  return kInProgress;
}

EXPORT int ncclCommGetAsyncError(Comm* comm, int* state) {
  {
    const std::lock_guard<std::mutex> lock(comm->world->mutex);
    *state = comm->world->joined == comm->world->size ? kSuccess : kInProgress;
  }
  if (g_polls_left.load() > 0 && g_polls_left.fetch_sub(1) > 0) {
    *state = kInProgress;
  }
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (g_async_error != 0) {
    *state = g_async_error;
  }
  return kSuccess;
}

EXPORT int ncclCommFinalize(Comm* comm) { return called("CommFinalize", comm->rank, ""); }

EXPORT int ncclCommDestroy(Comm* comm) {
  const int failure = called("CommDestroy", comm->rank, "");
  end(comm);
  return failure;
}

EXPORT int ncclCommAbort(Comm* comm) {
  const int failure = called("CommAbort", comm->rank, "");
  {
    const std::lock_guard<std::mutex> lock(comm->world->mutex);
    comm->aborted->store(true);
    comm->world->changed.notify_all();
  }
  end(comm);
  return failure;
}

EXPORT const char* ncclGetErrorString(int code) {
  return code == kInvalidArgument ? "invalid argument" : "unhandled stand-in error";
}
EXPORT const char* ncclGetLastError(Comm*) { return "the stand-in was told to fail"; }

EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm,
                         void* stream) {
  if (comm == nullptr) {
    return kInvalidArgument;  // as NCCL, of one that was aborted
  }
  if (int failure =
          called("AllReduce", comm->rank, numbers(count, type) + " op " + std::to_string(op))) {
    return failure;
  }
  add_collective(comm, stream, arrival_of(comm, in, out, op), [=](std::vector<Arrival>& all) {
    std::vector<std::byte> result(count * bytes_of(type));
    reduce_into(result.data(), operands_of(all, 0), count, type);
    for (const Arrival& one : all) {
      std::memcpy(one.out, result.data(), result.size());
    }
  });
  return answer();
}

EXPORT int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root,
                      Comm* comm, void* stream) {
  if (comm == nullptr) {
    return kInvalidArgument;  // as NCCL, of one that was aborted
  }
  if (int failure =
          called("Reduce", comm->rank, numbers(count, type) + " root " + std::to_string(root))) {
    return failure;
  }
  add_collective(comm, stream, arrival_of(comm, in, out, op), [=](std::vector<Arrival>& all) {
    reduce_into(all[static_cast<size_t>(root)].out, operands_of(all, 0), count, type);
  });
  return answer();
}

EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm,
                         void* stream) {
  if (comm == nullptr) {
    return kInvalidArgument;  // as NCCL, of one that was aborted
  }
  if (int failure =
          called("Broadcast", comm->rank, numbers(count, type) + " root " + std::to_string(root))) {
    return failure;
  }
  add_collective(comm, stream, {in, out, 0, 1.0}, [=](std::vector<Arrival>& all) {
    const void* from = all[static_cast<size_t>(root)].in;
    for (const Arrival& one : all) {
      std::memmove(one.out, from, count * bytes_of(type));
    }
  });
  return answer();
}

EXPORT int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm,
                         void* stream) {
  if (comm == nullptr) {
    return kInvalidArgument;  // as NCCL, of one that was aborted
  }
  if (int failure = called("AllGather", comm->rank, numbers(count, type))) {
    return failure;
  }
  add_collective(comm, stream, {in, out, 0, 1.0}, [=](std::vector<Arrival>& all) {
    const size_t bytes = count * bytes_of(type);
    std::vector<std::byte> whole(bytes * all.size());
    for (size_t r = 0; r < all.size(); ++r) {
      std::memcpy(whole.data() + r * bytes, all[r].in, bytes);
    }
    for (const Arrival& one : all) {
      std::memcpy(one.out, whole.data(), whole.size());
    }
  });
  return answer();
}

EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm,
                             void* stream) {
  if (comm == nullptr) {
    return kInvalidArgument;  // as NCCL, of one that was aborted
  }
  if (int failure = called("ReduceScatter", comm->rank, numbers(count, type))) {
    return failure;
  }
  add_collective(comm, stream, arrival_of(comm, in, out, op), [=](std::vector<Arrival>& all) {
    const size_t bytes = count * bytes_of(type);
    std::vector<std::byte> whole(bytes * all.size());
    for (size_t r = 0; r < all.size(); ++r) {
      reduce_into(whole.data() + r * bytes, operands_of(all, r * bytes), count, type);
    }
    for (size_t r = 0; r < all.size(); ++r) {
      std::memcpy(all[r].out, whole.data() + r * bytes, bytes);
    }
  });
  return answer();
}

EXPORT int ncclSend(const void* data, size_t count, int type, int peer, Comm* comm, void* stream) {
  if (comm == nullptr) {
    return kInvalidArgument;  // as NCCL, of one that was aborted
  }
  if (int failure =
          called("Send", comm->rank, numbers(count, type) + " to " + std::to_string(peer))) {
    return failure;
  }
  t_group.push_back({comm, static_cast<HostStream*>(stream), true, nullptr, peer, true,
                     static_cast<std::byte*>(const_cast<void*>(data)), count * bytes_of(type)});
  return kSuccess;
}

EXPORT int ncclRecv(void* data, size_t count, int type, int peer, Comm* comm, void* stream) {
  if (comm == nullptr) {
    return kInvalidArgument;  // as NCCL, of one that was aborted
  }
  if (int failure =
          called("Recv", comm->rank, numbers(count, type) + " from " + std::to_string(peer))) {
    return failure;
  }
  t_group.push_back({comm, static_cast<HostStream*>(stream), true, nullptr, peer, false,
                     static_cast<std::byte*>(data), count * bytes_of(type)});
  return kSuccess;
}

EXPORT int ncclGroupStart() {
  ++t_depth;
  return kSuccess;
}

EXPORT int ncclGroupEnd() {
  if (--t_depth > 0) {
    return kSuccess;
  }
  std::vector<Collected> group;
  group.swap(t_group);
  std::vector<Collected> messages;
  for (Collected& one : group) {
    if (one.is_message) {
      messages.push_back(std::move(one));
    } else {
      one.stream->add(std::move(one.run));
    }
  }
  if (!messages.empty()) {
    Comm* comm = messages.front().comm;
    HostStream* stream = messages.front().stream;
    add_messages(comm, stream, std::move(messages));
  }
  return group.empty() ? kSuccess : answer();
}

EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, Comm* comm) {
  if (residence != nccl::kHostImmediate) {
    return kInvalidArgument;
  }
  *op = comm->next_op++;
  with_type(type, [&]<class Format>(Format) {
    typename Format::Stored stored;
    std::memcpy(&stored, scalar, sizeof(stored));
    comm->own_ops[*op] = static_cast<double>(Format::load(stored));
  });
  return called("RedOpCreatePreMulSum", comm->rank, std::to_string(type));
}

EXPORT int ncclRedOpDestroy(int op, Comm* comm) {
  comm->own_ops.erase(op);
  return called("RedOpDestroy", comm->rank, "");
}

EXPORT int ncclCommRegister(Comm* comm, void*, size_t bytes, void** handle) {
  *handle = comm;
  return called("CommRegister", comm->rank, std::to_string(bytes));
}

EXPORT int ncclCommDeregister(Comm* comm, void*) {
  return called("CommDeregister", comm->rank, "");
}

// ---- for tests -------------------------------------------------------------------------------

EXPORT void fake_nccl_reset() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_log.clear();
  g_failures.clear();
  g_async_error = 0;
  g_hanging.clear();
  g_progress_polls.store(0);
  g_abort_ms.store(0);
}
EXPORT void fake_nccl_fail(const char* name, int code) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_failures[name] = code;
}
EXPORT void fake_nccl_async_error(int code) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_async_error = code;
}
EXPORT void fake_nccl_hang(int rank) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_hanging.insert(rank);
}
EXPORT void fake_nccl_in_progress(int polls) { g_progress_polls.store(polls); }
EXPORT void fake_nccl_slow_abort(int ms) { g_abort_ms.store(ms); }
EXPORT const char* fake_nccl_log() {
  static std::string copy;
  const std::lock_guard<std::mutex> lock(g_mutex);
  copy = g_log;
  return copy.c_str();
}
