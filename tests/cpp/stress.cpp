// Ranks as threads do random operations: every collective and path, synchronous and not, with
// priorities, several in flight, from the same seed on all ranks, with results checked.
//
//   stress WORLD SEED ROUNDS inproc|tcp|hosts
//
// Built under the address, undefined-behaviour and thread sanitizers. Ranks share nothing but
// what ranks that are processes share (arenas and control blocks), so a race that is found
// here is a race between processes, too. Over TCP they share nothing at all; with "hosts" even and
// odd ranks are on two hosts, and share memory with their local peers only.
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/base/error.h"
#include "comm/communicator.h"

using namespace dpcore;

namespace {

struct Pending {
  Work work;
  std::vector<int64_t> input;
  std::vector<int64_t> output;
  std::shared_ptr<std::byte> arena;
  int64_t* result = nullptr;
  std::vector<int64_t> expected;
};

int64_t value(int rank, size_t i) { return static_cast<int64_t>(i % 97) * (rank + 1) - rank; }

// What `rank` must hold afterwards.
std::vector<int64_t> expected_of(const Request& request, int rank, int world) {
  const auto sum = [&](size_t i) {
    int64_t total = 0;
    for (int r = 0; r < world; ++r) {
      total += value(r, i);
    }
    return total;
  };
  std::vector<int64_t> result;
  const size_t n = request.count;
  switch (request.collective) {
    case Collective::all_reduce:
      for (size_t i = 0; i < n; ++i) {
        result.push_back(sum(i));
      }
      break;
    case Collective::reduce_scatter:
      for (size_t i = 0; i < n; ++i) {
        result.push_back(sum(rank * n + i));
      }
      break;
    case Collective::all_gather:
      for (int r = 0; r < world; ++r) {
        for (size_t i = 0; i < n; ++i) {
          result.push_back(value(r, i));
        }
      }
      break;
    case Collective::all_to_all:
      for (int r = 0; r < world; ++r) {
        for (size_t i = 0; i < n; ++i) {
          result.push_back(value(r, rank * n + i));
        }
      }
      break;
    case Collective::broadcast:
      for (size_t i = 0; i < n; ++i) {
        result.push_back(value(request.root, i));
      }
      break;
    default:
      break;
  }
  return result;
}

void finish(Communicator& comm, Pending& pending, std::mt19937& local) {
  if (local() % 2 == 0) {
    comm.wait(*pending.work, 0, nullptr);
  } else {
    while (!pending.work->is_complete()) {
      std::this_thread::yield();
    }
  }
  CHECK(pending.work->status.load() == Operation::done);
  for (size_t i = 0; i < pending.expected.size(); ++i) {
    if (pending.result[i] != pending.expected[i]) {
      std::fprintf(stderr, "rank %d: %s: element %zu is %ld, expected %ld\n", comm.rank(),
                   pending.work->describe().c_str(), i, pending.result[i], pending.expected[i]);
      std::exit(1);
    }
  }
}

void run_rank(int rank, int world, unsigned seed, int rounds, std::shared_ptr<TcpOptions> tcp) {
  Options options;
  options.job = "stress-" + std::to_string(seed);
  options.rank = rank;
  options.world = world;
  options.threads = true;
  options.tcp = std::move(tcp);
  options.timeout_s = 120;
  const auto comm = Communicator::start(options);
  std::mt19937 shared(seed);        // the same choices on all ranks
  std::mt19937 local(seed + rank);  // this rank's own
  const Collective kinds[] = {Collective::all_reduce, Collective::reduce_scatter,
                              Collective::all_gather, Collective::all_to_all,
                              Collective::broadcast,  Collective::barrier};
  const size_t sizes[] = {0, 1, 3, 100, 2500, 40000, 140000};
  const char* algorithms[] = {
      "auto",        "auto", "auto", "ring", "two_shot", "one_shot/moves", "recursive_doubling",
      "hierarchical"};
  std::vector<std::unique_ptr<Pending>> pending;
  for (int round = 0; round < rounds; ++round) {
    Request request;
    request.collective = kinds[shared() % 6];
    request.dtype = DType::i64;
    request.count = sizes[shared() % 7] / (request.collective == Collective::all_reduce ||
                                                   request.collective == Collective::broadcast
                                               ? 1
                                               : static_cast<size_t>(world));
    request.priority = static_cast<int>(shared() % 3);
    if (request.collective == Collective::broadcast) {
      request.root = static_cast<int>(shared() % world);
    }
    const std::string algorithm =
        request.collective == Collective::all_reduce ? algorithms[shared() % 8] : "auto";
    const bool asynchronous = shared() % 2 == 0;
    const bool in_arena = local() % 2 == 0;

    auto one = std::make_unique<Pending>();
    one->expected = expected_of(request, rank, world);
    const bool splits = request.collective == Collective::reduce_scatter ||
                        request.collective == Collective::all_to_all;
    one->input.resize(request.count * (splits ? world : 1));
    for (size_t i = 0; i < one->input.size(); ++i) {
      one->input[i] = value(rank, i);
    }
    const size_t room = std::max(one->expected.size(), one->input.size());
    one->output.resize(room);
    one->result = one->output.data();
    if (in_arena) {
      one->arena = comm->allocate(room * sizeof(int64_t));
      one->result = reinterpret_cast<int64_t*>(one->arena.get());
    }
    request.input = reinterpret_cast<const std::byte*>(one->input.data());
    request.output = reinterpret_cast<std::byte*>(one->result);
    if (request.collective == Collective::broadcast ||
        (request.collective == Collective::all_reduce && shared() % 2 == 0)) {
      std::copy(one->input.begin(), one->input.end(), one->result);
      request.input = request.output;
    }
    one->work = comm->submit(std::move(request), algorithm);
    if (asynchronous) {
      pending.push_back(std::move(one));
    } else {
      finish(*comm, *one, local);
    }
    while (pending.size() > 6 || (!pending.empty() && local() % 4 == 0)) {
      const size_t which = local() % pending.size();
      finish(*comm, *pending[which], local);
      pending.erase(pending.begin() + static_cast<ptrdiff_t>(which));
    }
    if (round % 40 == 17) {
      const auto part = comm->split(rank % 2, rank, nullptr);
      part->run(Request{}, "", nullptr);
      part->close();
    }
    if (round % 10 == 3 && world > 1) {
      int64_t out = rank;
      int64_t in = -1;
      const int next = (rank + 1) % world;
      const int previous = (rank + world - 1) % world;
      const Work sent =
          comm->submit_message({true, next, 7, DType::i64, reinterpret_cast<std::byte*>(&out), 8});
      comm->run_message({false, previous, 7, DType::i64, reinterpret_cast<std::byte*>(&in), 8},
                        nullptr);
      comm->wait(*sent, 0, nullptr);
      CHECK(in == previous);
    }
  }
  for (auto& one : pending) {
    finish(*comm, *one, local);
  }
  // The end by failure: one rank gives up with operations in flight everywhere.
  int64_t data[1000] = {};
  Request last;
  last.collective = Collective::all_reduce;
  last.dtype = DType::i64;
  last.count = 1000;
  last.input = last.output = reinterpret_cast<std::byte*>(data);
  bool failed = false;
  try {
    // Or the end of one rank fails what others still wait for. It may be heard of in the barrier.
    comm->run(Request{}, "", nullptr);
    if (rank == world - 1 && world > 1) {
      comm->abort("enough");
      failed = true;
    } else if (world > 1) {
      for (int i = 0; i < 100; ++i) {
        comm->run(Request(last), "", nullptr);
      }
    } else {
      failed = true;
    }
  } catch (const PeerLost& problem) {
    failed = std::string(problem.what()).find("enough") != std::string::npos;
  }
  CHECK(failed);
  comm->close();
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 5);
  const int world = std::atoi(argv[1]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[2]));
  const int rounds = std::atoi(argv[3]);
  const bool on_hosts = std::string(argv[4]) == "hosts";
  const bool over_tcp = std::string(argv[4]) == "tcp" || on_hosts;
  auto listener = std::make_shared<TcpSocket>();
  std::string address;
  if (over_tcp && world > 1) {
    *listener = TcpSocket::listen_at(TcpAddress::resolve("127.0.0.1:0").front());
    address = listener->local_address().text();
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    std::shared_ptr<TcpOptions> tcp;
    if (over_tcp) {
      tcp = std::make_shared<TcpOptions>(TcpOptions{address, rank == 0 ? listener : nullptr, "",
                                                    "a secret", 3, on_hosts,
                                                    std::to_string(rank % 2)});
    }
    ranks.emplace_back(run_rank, rank, world, seed, rounds, tcp);
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  std::printf("stress: world %d, seed %u, %d rounds: fine\n", world, seed, rounds);
  return 0;
}
