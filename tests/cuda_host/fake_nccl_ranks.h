// Ranks of the stand-in for NCCL: who meets whom, what waits for what, and how tests steer it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device/device_host.h"
#include "cuda/nccl/nccl_library.h"

namespace nccl = dpcore::nccl;
using dpcore::HostStream;

namespace fake {

enum : int { kSuccess = 0, kInvalidArgument = 4, kInProgress = 7 };
constexpr int kFirstOwnOp = 5;

// ---- steering --------------------------------------------------------------------------------

inline std::mutex g_mutex;  // of all that follows
// Never destroyed: a thread that aborts a communicator may outlive the program.
inline std::string& g_log = *new std::string;
inline auto& g_failures = *new std::map<std::string, int>;  // what a call answers, once
inline int g_async_error = 0;
inline std::set<int> g_hanging;               // ranks whose device does nothing any more
inline std::atomic<int> g_progress_polls{0};  // answers of "in progress" after every call
inline std::atomic<int> g_polls_left{0};
inline std::atomic<int> g_abort_ms{0};  // from an abort until what waits on a device ends

inline int called(const std::string& name, int rank, const std::string& arguments) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_log += std::to_string(rank) + " " + name + (arguments.empty() ? "" : " " + arguments) + "\n";
  const auto found = g_failures.find(name);
  if (found == g_failures.end()) {
    return kSuccess;
  }
  const int code = found->second;
  g_failures.erase(found);
  return code;
}

// ---- ranks -----------------------------------------------------------------------------------

struct Arrival {
  const void* in;
  void* out;
  int op;
  double factor;
};

struct Message {
  const void* data;
  size_t bytes;
  bool taken = false;
};

struct World {
  explicit World(int ranks) : size(ranks) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  struct Barrier {
    std::vector<Arrival> arrivals;
    int count = 0;
    bool done = false;
    bool is_left = false;  // by one that was aborted: its memory is used no more
    int left = 0;
  };
  std::map<uint64_t, Barrier> barriers;                       // by number of the collective
  std::map<std::pair<int, int>, std::deque<Message*>> lines;  // (from, to)
};

inline std::map<std::string, std::shared_ptr<World>> g_worlds;
inline std::atomic<uint64_t> g_ids{0};

}  // namespace fake

struct dpcore::nccl::Comm {
  std::shared_ptr<fake::World> world;
  int rank = 0;
  uint64_t collectives = 0;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::map<int, double> own_ops;
  int next_op = fake::kFirstOwnOp;
  std::shared_ptr<int> work =
      std::make_shared<int>();  // held by what streams and graphs have of it
};

namespace fake {

using nccl::Comm;

// Per thread: groups of calls.
inline thread_local int t_depth = 0;
struct Collected {
  Comm* comm;
  HostStream* stream;
  bool is_message;
  std::function<void()> run;  // of a collective
  int peer;                   // of messages
  bool sends;
  std::byte* data;
  size_t bytes;
};
inline thread_local std::vector<Collected> t_group;

template <class Condition>
bool wait_in(World& world, std::unique_lock<std::mutex>& lock, const std::atomic<bool>& aborted,
             Condition condition) {
  world.changed.wait(lock, [&] { return aborted.load() || condition(); });
  if (!aborted.load()) {
    return true;
  }
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::milliseconds(g_abort_ms.load()));
  lock.lock();
  return false;
}

// Waits for all, the last one does it.
using Body = std::function<void(std::vector<Arrival>&)>;
inline void add_collective(Comm* comm, void* stream, Arrival own, Body body) {
  auto run = [world = comm->world, aborted = comm->aborted, work = comm->work, rank = comm->rank,
              number = comm->collectives++, own, body = std::move(body)] {
    const bool hangs = [rank] {
      const std::lock_guard<std::mutex> steering(g_mutex);
      return g_hanging.contains(rank);
    }();
    std::unique_lock<std::mutex> lock(world->mutex);
    if (hangs) {
      wait_in(*world, lock, *aborted, [] { return false; });
      return;
    }
    World::Barrier& barrier = world->barriers[number];
    if (barrier.arrivals.empty()) {
      barrier.arrivals.resize(static_cast<size_t>(world->size));
    }
    barrier.arrivals[static_cast<size_t>(rank)] = own;
    if (++barrier.count == world->size && !barrier.is_left) {
      body(barrier.arrivals);
      barrier.done = true;
      world->changed.notify_all();
    }
    if (!wait_in(*world, lock, *aborted, [&] { return barrier.done; })) {
      barrier.is_left = true;
      return;
    }
    if (++barrier.left == world->size) {
      world->barriers.erase(number);
    }
  };
  auto* to = static_cast<HostStream*>(stream);
  if (t_depth > 0) {
    t_group.push_back({comm, to, false, std::move(run), 0, false, nullptr, 0});
  } else {
    to->add(std::move(run));
  }
}

// The messages of a group travel at once; each side waits for the other.
inline void add_messages(Comm* comm, HostStream* stream, std::vector<Collected> messages) {
  stream->add([world = comm->world, aborted = comm->aborted, rank = comm->rank,
               messages = std::move(messages)] {
    std::unique_lock<std::mutex> lock(world->mutex);
    std::vector<Message> sent;
    sent.reserve(messages.size());
    for (const Collected& one : messages) {
      if (!one.sends) {
        continue;
      }
      sent.push_back({one.data, one.bytes});
      world->lines[{rank, one.peer}].push_back(&sent.back());
    }
    world->changed.notify_all();
    bool alive = true;
    for (const Collected& one : messages) {
      if (one.sends || !alive) {
        continue;
      }
      auto& line = world->lines[{one.peer, rank}];
      alive = wait_in(*world, lock, *aborted, [&] { return !line.empty(); });
      if (!alive) {
        break;
      }
      Message& message = *line.front();
      line.pop_front();
      std::memcpy(one.data, message.data, std::min(one.bytes, message.bytes));
      message.taken = true;
      world->changed.notify_all();
    }
    const auto all_taken = [&] {
      for (const Message& message : sent) {
        if (!message.taken) {
          return false;
        }
      }
      return true;
    };
    wait_in(*world, lock, *aborted, all_taken);
    for (auto& [who, line] : world->lines) {  // nobody may take what is gone
      std::erase_if(line, [&](const Message* m) {
        return !sent.empty() && m >= sent.data() && m <= &sent.back();
      });
    }
  });
}

}  // namespace fake
