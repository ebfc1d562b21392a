// Which functions an all-reduce enters. Two ranks as threads reduce ordinary tensors again and
// again. Before every second call rank 1 is late, so that rank 0 has to sleep. For each call but
// the first two, the program prints "prompt" or "late" and the offsets in itself of all functions
// that either rank entered. tools/entered_files.py turns them into the lists of files in
// docs/architecture.md.
//
//   entered mapped|tcp BYTES CALLS
//
// Built with -finstrument-functions (make build/cpp/entered/entered), so the compiler calls
// __cyg_profile_func_enter at the start of every function. It only records the address, in a table
// that is read while both ranks are between two calls.
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/communicator.h"

using namespace dpcore;

namespace {

constexpr size_t kRoom = size_t{1} << 14;
void* functions[kRoom];  // a hash table with open addressing, by address
bool is_recording = false;

// A rank that waits for so long has slept, and has looked whether its peers are alive.
constexpr auto kLate = std::chrono::milliseconds(60);

}  // namespace

extern "C" {

extern char __executable_start;

// Only builtins here: any function would be entered, too, and come back here.
__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void* function, void*) {
  if (!__atomic_load_n(&is_recording, __ATOMIC_ACQUIRE)) {
    return;
  }
  size_t at = reinterpret_cast<size_t>(function) / 16 % kRoom;
  for (size_t tries = 0; tries < kRoom; ++tries, at = (at + 1) % kRoom) {
    void* seen = nullptr;
    if (__atomic_compare_exchange_n(&functions[at], &seen, function, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED) ||
        seen == function) {
      return;
    }
  }
}

__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void*, void*) {}
}

namespace {

void print_and_forget(bool is_late) {
  std::puts(is_late ? "late" : "prompt");
  for (void*& function : functions) {
    if (function != nullptr) {
      std::printf("%#zx\n",
                  static_cast<size_t>(static_cast<char*>(function) - &__executable_start));
      function = nullptr;
    }
  }
}

void run_rank(Options options, size_t bytes, int calls, std::barrier<>& together) {
  const auto comm = Communicator::start(options);
  std::vector<float> data(bytes / sizeof(float), 1.0F);
  for (int call = 0; call < calls; ++call) {
    const bool is_late = call % 2 == 1;
    const bool is_first = call < 2;
    Request request;
    request.collective = Collective::all_reduce;
    request.dtype = DType::f32;
    request.count = data.size();
    request.input = reinterpret_cast<const std::byte*>(data.data());
    request.output = reinterpret_cast<std::byte*>(data.data());
    together.arrive_and_wait();
    if (options.rank == 0) {
      __atomic_store_n(&is_recording, !is_first, __ATOMIC_RELEASE);
    }
    together.arrive_and_wait();
    if (is_late && options.rank == 1) {
      std::this_thread::sleep_for(kLate);
    }
    comm->run(std::move(request), "auto", nullptr);
    together.arrive_and_wait();
    if (options.rank == 0) {
      __atomic_store_n(&is_recording, false, __ATOMIC_RELEASE);
      if (!is_first) {
        print_and_forget(is_late);
      }
    }
  }
  comm->close();
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 4);
  constexpr int kWorld = 2;
  const bool over_tcp = std::string(argv[1]) == "tcp";
  auto listener = std::make_shared<TcpSocket>();
  std::string address;
  if (over_tcp) {
    *listener = TcpSocket::listen_at(TcpAddress::resolve("127.0.0.1:0").front());
    address = listener->local_address().text();
  }
  std::barrier<> together(kWorld);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    Options options;
    options.job = "entered";
    options.rank = rank;
    options.world = kWorld;
    options.threads = true;
    if (over_tcp) {
      options.tcp = std::make_shared<TcpOptions>();
      options.tcp->root = address;
      options.tcp->listener = rank == 0 ? listener : nullptr;
      options.tcp->secret = "none";
    }
    ranks.emplace_back(run_rank, options, static_cast<size_t>(std::atoi(argv[2])),
                       std::atoi(argv[3]), std::ref(together));
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return 0;
}
