// See mapped_communicator.h.
#include "cuda/mapped_communicator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "comm/clock.h"
#include "comm/error.h"

namespace dpcore {
namespace {

constexpr size_t kMailboxBytes = size_t{4} << 20;
// Flags of a rank: one line of the cache for each peer, first what it sent, then what it took.
constexpr size_t kPageBytes = 4096;
constexpr int kMostRanks = kPageBytes / 64;
constexpr size_t kFlagDistance = 64 / sizeof(uint32_t);
constexpr size_t kTakenFrom = kPageBytes / sizeof(uint32_t);
// Further than any number in use can be behind: the comparison goes around at 2^32.
constexpr uint32_t kReleased = 1u << 30;
constexpr auto kNap = std::chrono::milliseconds(1);
constexpr int64_t kDeparturePatienceNs = 1'000'000'000;

struct Card {  // what ranks tell each other
  MemoryHandle stage;
  uint64_t page = 0;  // offset in the arena
};

uint32_t* sent_flag(uint32_t* page, int to) {
  return page + static_cast<size_t>(to) * kFlagDistance;
}
uint32_t* taken_flag(uint32_t* page, int from) {
  return page + kTakenFrom + static_cast<size_t>(from) * kFlagDistance;
}

}  // namespace

std::shared_ptr<MappedCommunicator> MappedCommunicator::start(std::shared_ptr<Communicator> control,
                                                              std::shared_ptr<Device> device,
                                                              Options options) {
  if (control->group().remote() != nullptr) {
    throw Unsupported(
        "backend='cuda' maps memory of the ranks' devices, so they have to share a host; use "
        "backend='nccl' between hosts");
  }
  if (control->world() > kMostRanks) {
    throw Unsupported("backend='cuda' is for at most " + std::to_string(kMostRanks) + " ranks");
  }
  std::shared_ptr<MappedCommunicator> comm(
      new MappedCommunicator(std::move(control), std::move(device), std::move(options)));
  try {
    comm->meet();
  } catch (const Error& problem) {  // the others would wait for this rank
    if (!comm->group().failed()) {
      comm->watch_->fail(ErrorKind::other, comm->rank(), problem.what());
    }
    throw;
  }
  return comm;
}

MappedCommunicator::MappedCommunicator(std::shared_ptr<Communicator> control,
                                       std::shared_ptr<Device> device, Options options)
    : StreamCommunicator(std::move(control), std::move(device), std::move(options)) {
  watch();
}

MappedCommunicator::~MappedCommunicator() {
  close();
  forget_peers();
  for (uint32_t* page : pages_) device_->forget_host(page);
  if (stage_ != nullptr && !group().failed() && everybody_leaves()) {
    device_->release(stage_);
  } else {
    // Whoever is still there, or was stopped and wakes up, may read it and raise flags: never given
    // to anybody else.
    new std::shared_ptr<std::byte>(std::move(own_page_));
  }
  watch_.reset();
}

void MappedCommunicator::forget_peers() {
  for (std::byte* stage : imported_) {
    if (stage != nullptr) device_->forget_memory(stage);
  }
  imported_.clear();
}

// Memory may go when no peer has it mapped: each forgets it before it leaves. Ranks usually leave
// together.
bool MappedCommunicator::everybody_leaves() {
  const int64_t deadline = now_ns() + kDeparturePatienceNs;
  while (!group().everybody_left()) {
    if (now_ns() > deadline) return false;
    group().endpoint().look_for_deaths();
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

void MappedCommunicator::meet() {
  const auto ranks = static_cast<size_t>(world());
  Arena& arena = control_->endpoint().arena();
  own_page_ = arena.allocate(2 * kPageBytes, kPageBytes);
  std::fill_n(own_page_.get(), 2 * kPageBytes, std::byte{0});
  stage_ = device_->allocate(ranks * kMailboxBytes);
  Card own{device_->share_memory(stage_), arena.offset_of(own_page_.get(), 1)};
  std::vector<Card> cards(ranks);
  Request request;
  request.collective = Collective::all_gather;
  request.count = sizeof(Card);
  request.input = reinterpret_cast<const std::byte*>(&own);
  request.output = reinterpret_cast<std::byte*>(cards.data());
  control_->run(std::move(request), "auto", options_.interrupt);

  imported_.assign(ranks, nullptr);
  outgoing_.resize(ranks);
  incoming_.resize(ranks);
  std::vector<uint32_t*> on_device(ranks);
  for (int r = 0; r < world(); ++r) {
    std::byte* page = r == rank() ? own_page_.get()
                                  : control_->group().base(r) + cards[static_cast<size_t>(r)].page;
    pages_.push_back(reinterpret_cast<uint32_t*>(page));
    on_device[static_cast<size_t>(r)] =
        reinterpret_cast<uint32_t*>(device_->map_host(page, 2 * kPageBytes));
  }
  uint32_t* own_flags = on_device[static_cast<size_t>(rank())];
  for (int r = 0; r < world(); ++r) {
    if (r == rank()) continue;
    const auto peer = static_cast<size_t>(r);
    imported_[peer] = device_->map_memory(cards[peer].stage);
    outgoing_[peer] = {stage_ + peer * kMailboxBytes, sent_flag(own_flags, r),
                       taken_flag(on_device[peer], rank())};
    incoming_[peer] = {imported_[peer] + static_cast<size_t>(rank()) * kMailboxBytes,
                       sent_flag(on_device[peer], rank()), taken_flag(own_flags, r)};
  }
}

std::shared_ptr<StreamCommunicator> MappedCommunicator::split(int color, int key) {
  auto control = split_control(color, key);
  return control ? start(std::move(control), device_, options_) : nullptr;
}

// ---- calls -----------------------------------------------------------------------------------

void MappedCommunicator::plan(Request& request, const std::string& algorithm) {
  if (device_->is_capturing(stream_)) {
    throw Unsupported(
        "backend='cuda' can't be captured into a graph: its flags are numbers that "
        "grow with every call");
  }
  if (request.collective == Collective::barrier) return;
  if (!request.program) {
    bool literal = false;  // there is nothing else
    const std::string wanted = algorithm_of(request, algorithm, literal);
    request.program = program_for(
        request,
        wanted == "auto" ? algorithm_of_fewest_bytes(request.collective, world()) : wanted);
  }
  request.algorithm = request.program->hash;
  check_deterministic(request);
}

void MappedCommunicator::enqueue(const Request& request) {
  if (request.collective != Collective::barrier) {
    run_moves(request, *device_, stream_, *this, [this](size_t bytes) { return scratch(bytes); });
    return;
  }
  std::byte* token = scratch(2);
  for (int r = 0; r < world(); ++r) {
    if (r == rank()) continue;
    send(token, 1, r);
    receive(token + 1, 1, r);
  }
  end_group();
}

void MappedCommunicator::enqueue(const std::vector<StreamMessage>& messages) {
  for (const StreamMessage& message : messages) {
    if (message.sends) {
      send(message.data, message.bytes, message.peer);
    } else {
      receive(message.data, message.bytes, message.peer);
    }
  }
  end_group();
}

void MappedCommunicator::send(const void* data, size_t bytes, int to) {
  sends_.push_back({static_cast<std::byte*>(const_cast<void*>(data)), bytes, to});
}

void MappedCommunicator::receive(void* data, size_t bytes, int from) {
  receives_.push_back({static_cast<std::byte*>(data), bytes, from});
}

// Piece by piece: all mailboxes are filled before one is emptied, and a mailbox is filled again
// when the piece before has been taken. So each rank's k-th turn needs of the others no more than
// their k-th filling and their emptying before it, and nobody waits in a circle.
void MappedCommunicator::end_group() {
  // Several messages to one peer are taken one after the other, in as many turns.
  const auto turns = [](std::vector<Message>& messages, auto piece) {
    std::vector<std::pair<Message, size_t>> open;  // with how much of it has gone
    for (const Message& message : messages) open.push_back({message, 0});
    messages.clear();
    return [open = std::move(open), piece]() mutable {
      std::vector<int> served;
      for (auto& [message, at] : open) {
        if (at >= message.bytes ||
            std::find(served.begin(), served.end(), message.peer) != served.end()) {
          continue;
        }
        const size_t n = std::min(message.bytes - at, kMailboxBytes);
        piece(message, at, n);
        at += n;
        served.push_back(message.peer);
      }
      return !served.empty();
    };
  };
  auto send_turn = turns(
      sends_, [this](const Message& message, size_t at, size_t n) { send_piece(message, at, n); });
  auto receive_turn = turns(receives_, [this](const Message& message, size_t at, size_t n) {
    receive_piece(message, at, n);
  });
  bool goes_on = true;
  while (goes_on) {
    goes_on = send_turn();
    goes_on |= receive_turn();
  }
}

void MappedCommunicator::send_piece(const Message& message, size_t at, size_t bytes) {
  Line& line = outgoing_[static_cast<size_t>(message.peer)];
  device_->wait_flag(stream_, line.taken, line.number);  // the mailbox is empty
  device_->copy(stream_, line.mailbox, message.data + at, bytes);
  device_->raise_flag(stream_, line.sent, ++line.number);
}

void MappedCommunicator::receive_piece(const Message& message, size_t at, size_t bytes) {
  Line& line = incoming_[static_cast<size_t>(message.peer)];
  device_->wait_flag(stream_, line.sent, ++line.number);
  device_->copy(stream_, message.data + at, line.mailbox, bytes);
  device_->raise_flag(stream_, line.taken, line.number);
}

// ---- the end ---------------------------------------------------------------------------------

// The mailboxes are this rank's memory: they have to be empty before it goes.
void MappedCommunicator::release() {
  const int64_t deadline = now_ns() + to_ns(options_.timeout_s);
  for (int r = 0; r < world(); ++r) {
    if (r == rank()) continue;
    const std::atomic_ref<uint32_t> taken(*taken_flag(pages_[static_cast<size_t>(r)], rank()));
    while (taken.load() != outgoing_[static_cast<size_t>(r)].number) {
      group().endpoint().look_for_deaths();
      if (group().adopt_failure_of_peer() || group().is_dead(r) || now_ns() > deadline) {
        watch_->fail(ErrorKind::peer_lost, r,
                     "rank " + std::to_string(r) + " has not taken what rank " +
                         std::to_string(rank()) + " sent before it left");
        return;
      }
      std::this_thread::sleep_for(kNap);
    }
  }
  forget_peers();
}

// Raises the flags that this rank's stream waits for; it is the only one to wait for them.
void MappedCommunicator::stop() {
  const std::lock_guard<std::mutex> lock(calls_);
  device_->attach();
  const Device::Event passed = device_->make_event();
  device_->record(passed, stream_);
  const auto raise = [](uint32_t* flag, uint32_t number) {
    const std::atomic_ref<uint32_t> value(*flag);
    if (value.load() != number + kReleased) value.store(number + kReleased);
  };
  while (!device_->has_happened(passed)) {  // a peer's stream may have lowered one again
    for (int r = 0; r < world(); ++r) {
      if (r == rank()) continue;
      const auto peer = static_cast<size_t>(r);
      raise(sent_flag(pages_[peer], rank()), incoming_[peer].number);
      raise(taken_flag(pages_[peer], rank()), outgoing_[peer].number);
    }
    std::this_thread::sleep_for(kNap);
  }
  device_->destroy_event(passed);
}

}  // namespace dpcore
