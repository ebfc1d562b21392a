// See stream_communicator.h.
#include "cuda/stream/stream_communicator.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <thread>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "cuda/stream/done_flag.h"

namespace dpcore {
namespace {

constexpr int64_t kFailedPatienceNs = 5'000'000'000;
constexpr size_t kPoolTries = 4;
constexpr auto kFirstNap = std::chrono::microseconds(20);
constexpr auto kLongestNap = std::chrono::microseconds(1000);

TraceEvent event_of(const StreamWork& work, uint64_t bytes) {
  const bool is_message = !work.message.empty();
  TraceEvent event;
  // The names of collectives are literals.
  event.name =
      is_message ? "messages" : name_of(static_cast<Collective>(work.what.collective)).data();
  event.kind = EventKind::operation;
  event.operation = work.number;
  event.bytes = bytes;
  return event;
}

}  // namespace

StreamCommunicator::StreamCommunicator(std::shared_ptr<Communicator> control,
                                       std::shared_ptr<Device> device, Options options)
    : control_(std::move(control)),
      device_(std::move(device)),
      options_(std::move(options)),
      programs_(control_->rank(), control_->world(), {}, options_.deterministic) {
  check_algorithm_name(options_.algorithm);
  if (!options_.trace) {
    options_.trace = std::make_shared<DeviceTrace>(device_);
  }
  const DeviceGuard here(*device_);
  stream_ = device_->make_stream();
  entry_ = device_->make_event();
  black_box_ = control_->split(0, control_->rank(), options_.interrupt);
}

StreamCommunicator::~StreamCommunicator() {
  let_go_of_kept(true);
  at_the_end(*device_, [this] {
    if (device_->is_capturing(stream_) || !device_->is_idle(stream_)) {
      return;  // it never passed: what stands there may still use the memory
    }
    for (std::byte* memory : scratch_) {
      device_->release_idle(memory);
    }
  });
  at_the_end(*device_, [this] {
    device_->destroy_event(entry_);
    device_->destroy_stream(stream_);
  });
}

void StreamCommunicator::watch() {
  Watched& watched = *this;  // a base that only we may convert to
  watch_ = std::make_unique<StreamWatch>(black_box_, device_, watched);
}

void StreamCommunicator::check_usable() const {
  control_->check_usable();
  group().failure().check();
}

// ---- calls -----------------------------------------------------------------------------------

DeviceTrace::Span StreamCommunicator::begin_span(const StreamWork& work, uint64_t bytes,
                                                 const Request* request) {
  if (!trace().recording() || work.captured) {
    return 0;
  }
  TraceEvent event = event_of(work, bytes);
  if (request != nullptr) {
    event.path = path_of(*request);
    event.world = world();
    event.root = has_root(request->collective) ? request->root : -1;
    if (const auto& program = request->program) {
      event.schedule = program->identity;
      host_trace().keep(program->identity, {program, &program->schedule});
    }
  }
  return trace().begin(event, stream_);
}

template <class Enqueue>
StreamCommunicator::Work StreamCommunicator::run(const Request* request, const Fingerprint& what,
                                                 uint64_t bytes, std::string message,
                                                 double timeout_s, Device::Stream current,
                                                 std::unique_lock<std::mutex> calls,
                                                 Enqueue enqueue) {
  const Work work = take_work();
  work->captured = capturing_;
  if (capturing_) {
    has_captured_.store(true);
  }
  work->what = what;
  work->message = std::move(message);
  // Messages are between two ranks: they have no number that all agree on.
  work->number = work->message.empty() && !work->captured ? next_number_++ : next_number_;
  work->timeout_s = timeout_s > 0 ? timeout_s : options_.timeout_s;
  work->deadline_ns = now_ns() + to_ns(work->timeout_s);
  if (work->message.empty() && !work->captured) {
    watch_->announce(work->number, what, bytes);
  }
  try {
    device_->record(entry_, current);
    device_->wait(stream_, entry_);
    work->traced = begin_span(*work, bytes, request);
    enqueue();
    trace().end(work->traced, stream_);
    device_->record(work->event, stream_);
    if (done_flag_ != nullptr) {  // after the event: a stream that passes finds it complete
      work->flag_number = done_flag_->raise(stream_);
    }
  } catch (const Error& problem) {  // others have started it already, or will
    watch_->fail(
        ErrorKind::other, rank(),
        work->describe() + " failed on rank " + std::to_string(rank()) + ": " + problem.what());
    end_half_done(*work, calls);
    group().failure().raise();
  } catch (...) {  // the caller's interrupt, in the middle of what the others have started
    watch_->give_up("was interrupted during " + work->describe());
    end_half_done(*work, calls);
    throw;
  }
  if (work->captured) {
    work->state.store(StreamWork::done, std::memory_order_release);
  } else {
    work->state.store(StreamWork::pending, std::memory_order_release);
    watch_->add(work);
  }
  return work;
}

// Before the caller hears of a failure, and has its memory back: what was put into the stream of
// the operation is done, or never will be. To look may end the stream, which takes the lock.
void StreamCommunicator::end_half_done(const StreamWork& work,
                                       std::unique_lock<std::mutex>& calls) {
  calls.unlock();
  if (!work.captured) {
    watch_->look();
  }
}

StreamCommunicator::Work StreamCommunicator::submit(Request request, const std::string& algorithm,
                                                    Device::Stream current) {
  check_operator(request);
  std::unique_lock<std::mutex> calls = enter(current);
  const DeviceGuard here(*device_);
  capturing_ = device_->is_capturing(current);
  if (algorithm.empty() && !request.program) {
    request.program = programs_.own_for(request.collective, request.root);
  }
  plan(request, algorithm);
  return run(&request, fingerprint_of(request), request.count * size_of(request.dtype), {},
             request.timeout_s, current, std::move(calls), [&] { enqueue(request); });
}

StreamCommunicator::Work StreamCommunicator::submit(const std::vector<StreamMessage>& messages,
                                                    double timeout_s, Device::Stream current) {
  std::string text;
  uint64_t bytes = 0;
  for (const StreamMessage& message : messages) {
    check_peer(message.peer, rank(), world());
    bytes += message.bytes;
    text += (text.empty() ? "" : ", ") + std::string(message.sends ? "send" : "recv") + " of " +
            std::to_string(message.bytes) + " bytes " + (message.sends ? "to" : "from") + " rank " +
            std::to_string(message.peer);
  }
  std::unique_lock<std::mutex> calls = enter(current);
  const DeviceGuard here(*device_);
  capturing_ = device_->is_capturing(current);
  return run(nullptr, {}, bytes, text.empty() ? "no message" : text, timeout_s, current,
             std::move(calls), [&] { enqueue(messages); });
}

StreamCommunicator::Work StreamCommunicator::take_work() {
  auto fresh = [this] {
    auto work = std::make_shared<StreamWork>();
    work->device = device_;
    work->event = device_->make_event();
    return work;
  };
  if (capturing_) {
    return fresh();  // it is the graph's: it is never taken again
  }
  if (const Work* const free = free_work()) {
    pool_at_ = static_cast<size_t>(free - pool_.data()) + 1;
    return *free;
  }
  ++pool_at_;  // or a work that the program keeps would be in the way for ever
  pool_.push_back(fresh());
  return pool_.back();
}

// Works end in the order in which they were taken: when these are busy, so are the others.
const StreamCommunicator::Work* StreamCommunicator::free_work() const {
  for (size_t i = 0; i < std::min(pool_.size(), kPoolTries); ++i) {
    const Work& candidate = pool_[(pool_at_ + i) % pool_.size()];
    if (candidate.use_count() == 1 && candidate->is_complete()) {
      return &candidate;
    }
  }
  return nullptr;
}

// The lock under which a call is made. A work is free again once a thread has seen that it is
// complete, and the thread that watches may be late: before the pool grows, the caller checks.
std::unique_lock<std::mutex> StreamCommunicator::enter(Device::Stream current) {
  let_go_of_kept(false);
  std::unique_lock<std::mutex> lock(calls_);
  check_usable();  // with the lock: behind what ended the stream, nothing may come
  if (!pool_.empty() && free_work() == nullptr && !device_->is_capturing(current)) {
    lock.unlock();  // to look may end the stream, which takes the lock
    watch_->look();
    lock.lock();
    check_usable();
  }
  return lock;
}

void StreamCommunicator::run_by_default(const Schedule& schedule) {
  const std::lock_guard<std::mutex> lock(calls_);
  programs_.use_own(schedule);
}

std::byte* StreamCommunicator::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    if (device_->is_capturing(stream_)) {
      throw Error("this operation needs " + std::to_string(bytes) +
                  " bytes of memory, which can't be taken while a graph is captured: run it once "
                  "before");
    }
    scratch_bytes_ = std::max(bytes, 2 * scratch_bytes_);
    scratch_.push_back(device_->allocate(scratch_bytes_));
  }
  return scratch_.back();
}

// ---- waiting ---------------------------------------------------------------------------------

bool StreamCommunicator::wait_for_stream(std::unique_lock<std::mutex>& calls, int64_t deadline_ns,
                                         const std::function<void()>& meanwhile) {
  auto nap = kFirstNap;
  while (now_ns() < deadline_ns) {
    meanwhile();
    // A thread in a call may still put work there; one that comes later is refused.
    // While a graph is captured the stream can't be asked, but what runs there is in flight.
    if ((calls.owns_lock() || calls.try_lock()) &&
        (device_->is_capturing(stream_) ? watch_->has_all_happened() : device_->is_idle(stream_))) {
      return true;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, std::chrono::microseconds(kLongestNap));
  }
  return false;
}

void StreamCommunicator::order(const Work& work, Device::Stream current) {
  if (device_->is_caller(current)) {
    trace().waits(work->traced, current, true);
    wait(work, 0, options_.interrupt);
    return;
  }
  if (work->state.load(std::memory_order_acquire) == StreamWork::failed) {
    group().failure().raise();
  }
  const DeviceGuard here(*device_);
  trace().waits(work->traced, current);
  if (done_flag_ != nullptr && !device_->is_capturing(current)) {
    done_flag_->wait(current, work->flag_number);
  } else {
    device_->wait(current, work->event);
  }
}

void StreamCommunicator::wait(const Work& work, double timeout_s,
                              const Engine::Interrupt& interrupt) {
  const int64_t begin = now_ns();
  const int64_t deadline = timeout_s > 0 ? begin + to_ns(timeout_s) : INT64_MAX;
  auto nap = kFirstNap;
  try {
    while (!work->is_complete()) {
      if (!group().failed() && device_->has_happened(work->event)) {
        watch_->look();
        continue;
      }
      if (now_ns() > deadline && !group().failed()) {
        watch_->fail(ErrorKind::timeout, -1,
                     work->describe() + " was not complete " + std::to_string(timeout_s) +
                         " s after wait() began");
      }
      if (interrupt) {
        interrupt();
      }
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, std::chrono::microseconds(kLongestNap));
    }
  } catch (const Error&) {
    throw;
  } catch (...) {  // Ctrl-C: the operation can't be taken back, so no rank can go on
    watch_->give_up("was interrupted during " + work->describe());
    throw;
  }
  TraceEvent exposed = event_of(*work, 0);
  exposed.kind = EventKind::exposed;
  exposed.begin_ns = begin;
  exposed.end_ns = now_ns();
  host_trace().add(exposed);
  if (work->state.load(std::memory_order_acquire) == StreamWork::failed) {
    group().failure().raise();
  }
}

void StreamCommunicator::keep(Work work, std::shared_ptr<void> memory) {
  const std::lock_guard<std::mutex> lock(keeping_);
  kept_.push_back({std::move(work), std::move(memory)});
  keeps_.store(true);
}

void StreamCommunicator::let_go_of_kept(bool all) {
  if (!keeps_.load()) {
    return;
  }
  std::vector<Kept> done;  // ends without the lock: it may want that of Python
  const std::lock_guard<std::mutex> lock(keeping_);
  const auto is_needed = [all](const Kept& kept) { return !all && !kept.work->is_complete(); };
  const auto first = std::stable_partition(kept_.begin(), kept_.end(), is_needed);
  done.assign(std::make_move_iterator(first), std::make_move_iterator(kept_.end()));
  kept_.erase(first, kept_.end());
  keeps_.store(!kept_.empty());
}

std::vector<TraceEvent> StreamCommunicator::stop_trace(uint64_t* dropped) {
  const int64_t deadline = now_ns() + to_ns(options_.timeout_s);
  return trace().stop(dropped, [&] {
    if (options_.interrupt) {
      options_.interrupt();
    }
    return group().failed() || closed() || now_ns() > deadline;
  });
}

// ---- groups and the end ----------------------------------------------------------------------

std::shared_ptr<Communicator> StreamCommunicator::split_control(int color, int key) {
  check_usable();
  return control_->split(color, key, options_.interrupt);
}

void StreamCommunicator::abort(const std::string& reason) {
  watch_->give_up("gave up: " + reason);
  watch_->look();
}

void StreamCommunicator::close() {
  if (closed_.exchange(true) || control_->endpoint().is_forked_copy()) {
    return;
  }
  const bool had_failed = group().failed();
  std::optional<DeviceGuard> here;
  try {
    here.emplace(*device_);
  } catch (const Error&) {  // it is broken: what is in flight fails, and the rest ends as usual
  }
  watch_->close(now_ns() + (had_failed ? kFailedPatienceNs : to_ns(options_.timeout_s)));
  if (group().failed()) {
    control_->abort(group().failure().get().record.reason);  // the program hears it from here
  } else {
    release();
  }
  let_go_of_kept(true);  // everything is complete
  black_box_->close();
  control_->close();
}

}  // namespace dpcore
