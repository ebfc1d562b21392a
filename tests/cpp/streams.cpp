// Ranks as threads exchange over mapped memory (csrc/cuda/mapped/mapped_communicator.h) on devices
// of the host, whose streams are threads: random collectives and algorithms, waited for by streams,
// by the host or not at all, several in flight, from the same seed on all ranks, with results
// checked. Some runs end with a rank that does not come. All the time the program's current device
// is another one, and has to stay it.
//
//   streams WORLD SEED ROUNDS
//
// Under the thread sanitizer: what two streams touch without a flag between them is a race here as
// it would be on a GPU.
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/base/error.h"
#include "cuda/device/device_host.h"
#include "cuda/device/host_pages.h"
#include "cuda/mapped/mapped_communicator.h"

using namespace dpcore;

namespace {

constexpr const char* kAlgorithms[] = {"", "ring/moves", "one_shot/moves", "tree/moves"};

struct Pending {
  StreamCommunicator::Work work;
  std::vector<int32_t> data;
  int32_t expected = 0;
};

void check(const Pending& pending) {
  for (const int32_t value : pending.data) {
    CHECK(value == pending.expected);
  }
}

Pending start(StreamCommunicator& comm, std::mt19937& dice, size_t elements,
              bool needs_all_ranks = false, Device::Stream current = nullptr) {
  const int world = comm.world();
  Pending pending;
  Request request;
  request.dtype = DType::i32;
  request.count = elements;
  if (!needs_all_ranks && dice() % 3 == 0) {
    request.collective = Collective::broadcast;
    request.root = static_cast<int>(dice() % static_cast<unsigned>(world));
    pending.data.assign(elements, 100 + comm.rank());
    pending.expected = 100 + request.root;
  } else {
    request.collective = Collective::all_reduce;
    pending.data.assign(elements, 1 + comm.rank());
    pending.expected = world * (world + 1) / 2;
  }
  request.output = reinterpret_cast<std::byte*>(pending.data.data());
  request.input = request.output;
  const std::string algorithm =
      request.collective == Collective::all_reduce ? kAlgorithms[dice() % 4] : "";
  pending.work = comm.submit(std::move(request), algorithm, current);
  return pending;
}

// The host goes on, and the stream stands still until the last rank has come: that is what a trace
// has to say of it, and of which operation.
void wait_for_a_late_rank(StreamCommunicator& comm, std::mt19937& dice) {
  constexpr auto kLate = std::chrono::milliseconds(200);  // from when the others have come
  constexpr int64_t kSurelyWaitedNs = 20'000'000;
  static std::atomic<int> others_that_came{0};
  const DeviceGuard here(comm.device());
  const Device::Stream stream = comm.device().make_stream();
  comm.trace().start(8);
  if (comm.rank() == 0) {
    while (others_that_came < comm.world() - 1) {
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(kLate);
  }
  const Pending pending = start(comm, dice, 1000, true, stream);
  comm.order(pending.work, stream);
  if (comm.rank() > 0) {
    ++others_that_came;
  }
  comm.device().synchronize(stream);
  check(pending);
  uint64_t dropped = 0;
  TraceEvent operation;
  TraceEvent exposed;
  for (const TraceEvent& event : comm.stop_trace(&dropped)) {
    (event.kind == EventKind::exposed ? exposed : operation) = event;
  }
  CHECK(operation.kind == EventKind::operation && operation.end_ns > operation.begin_ns);
  if (comm.rank() > 0) {
    CHECK(exposed.kind == EventKind::exposed && exposed.operation == operation.operation);
    CHECK(exposed.end_ns == operation.end_ns);
    CHECK(exposed.end_ns - exposed.begin_ns > kSurelyWaitedNs);
  }
  comm.device().destroy_stream(stream);
}

// Memory that no thread waits for is kept until its operation is over, and goes on a thread of the
// program.
void keep_memory(StreamCommunicator& comm, std::mt19937& dice) {
  std::thread::id let_go_by;
  Pending pending = start(comm, dice, 100, true);
  comm.keep(pending.work, std::shared_ptr<void>(
                              &pending, [&](void*) { let_go_by = std::this_thread::get_id(); }));
  comm.wait(pending.work, 0, nullptr);
  CHECK(let_go_by == std::thread::id());
  const Pending next = start(comm, dice, 100, true);
  CHECK(let_go_by == std::this_thread::get_id());
  comm.wait(next.work, 0, nullptr);
}

// The first one begins, the last one ends; one that can't begin counts for nothing.
void pages_are_counted() {
  alignas(64) std::array<std::byte, 128> pages{};
  int begun = 0;
  int ended = 0;
  const auto take = [&] {
    return share_host_pages(pages.data(), pages.size(), [&] { ++begun; }, [&] { ++ended; });
  };
  bool raised = false;
  try {
    share_host_pages(pages.data(), pages.size(), [] { throw Error("no"); }, [&] { ++ended; });
  } catch (const Error&) {
    raised = true;
  }
  CHECK(raised && !are_host_pages_shared(pages.data()));
  for (int round = 1; round < 3; ++round) {
    auto first = take();
    auto second = take();
    CHECK(begun == round && are_host_pages_shared(pages.data() + 127));
    CHECK(!are_host_pages_shared(pages.data() + 128));
    first.reset();
    CHECK(ended == round - 1 && are_host_pages_shared(pages.data()));
    second.reset();
    CHECK(ended == round && !are_host_pages_shared(pages.data()));
  }
}

// The clock of a device that has no time for it.
void a_device_that_is_busy_has_a_name() {
  std::string said;
  for (int attempt = 0; attempt < 100 && said.empty(); ++attempt) {
    DeviceTrace trace(device_named("host", "busy"), 1e-9);
    try {
      trace.start(1);
    } catch (const Timeout& late) {
      said = late.what();
    }
  }
  CHECK(said.starts_with("the clock of host could not be read"));
}

void run_rank(int rank, int world, const std::string& job, unsigned seed, int rounds) {
  Options options;
  options.job = job;
  options.rank = rank;
  options.world = world;
  options.threads = true;
  // Of two: streams that are let pass carry garbage (mapped_communicator.h), and among more ranks
  // one would copy out of a mailbox while another copies in.
  const bool one_stays_away = world == 2 && seed % 2 == 1;
  // GPUs of their own: kernels wait for each other; one GPU: the streams do.
  const std::string uuid = seed % 4 < 2 ? "one" : "gpu " + std::to_string(rank);
  auto comm = MappedCommunicator::start(Communicator::start(options), device_named("host", uuid),
                                        {one_stays_away ? 2.0 : 60.0, "auto", false, nullptr});
  const auto programs = device_named("host", "of the program");
  const DeviceGuard here(*programs);
  const auto is_as_it_was = [&] { return current_host_device() == programs.get(); };
  std::mt19937 dice(seed);                                      // the same on all ranks
  std::mt19937 own(seed * 1000 + static_cast<unsigned>(rank));  // not
  std::vector<Pending> in_flight;
  comm->trace().start(static_cast<size_t>(rounds));
  for (int round = 0; round < rounds; ++round) {
    in_flight.push_back(start(*comm, dice, 1 + dice() % 3000));
    if (own() % 3 != 0 || in_flight.size() > 8) {
      for (Pending& pending : in_flight) {
        if (own() % 2 == 0) {
          comm->wait(pending.work, 0, nullptr);
        } else {
          comm->order(pending.work, nullptr);
        }
        check(pending);
      }
      in_flight.clear();
    }
    CHECK(is_as_it_was());
  }
  for (Pending& pending : in_flight) {
    comm->wait(pending.work, 0, nullptr);
    check(pending);
  }
  in_flight.clear();
  uint64_t dropped = 0;
  const std::vector<TraceEvent> recorded = comm->stop_trace(&dropped);
  CHECK(recorded.size() == static_cast<size_t>(rounds) && dropped == 0);
  for (const TraceEvent& event : recorded) {
    CHECK(event.begin_ns <= event.end_ns);
  }
  wait_for_a_late_rank(*comm, dice);
  keep_memory(*comm, dice);
  CHECK(is_as_it_was());
  if (one_stays_away && rank > 0) {
    Pending pending = start(*comm, dice, 100, true);
    bool raised = false;
    try {
      comm->wait(pending.work, 0, nullptr);
    } catch (const Error&) {  // late, or gone
      raised = true;
    }
    CHECK(raised);
    comm->close();  // the stream has passed: nothing touches `pending` any more
  }
  comm->close();
  comm.reset();
  CHECK(is_as_it_was());
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  const int world = std::stoi(argv[1]);
  const auto seed = static_cast<unsigned>(std::stoul(argv[2]));
  const int rounds = std::stoi(argv[3]);
  const std::string job = "streams-" + std::to_string(seed);
  pages_are_counted();
  a_device_that_is_busy_has_a_name();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back(run_rank, rank, world, job, seed, rounds);
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  std::printf("world %d, seed %u, %d rounds: fine\n", world, seed, rounds);
  return 0;
}
