// See callback_threads.h.
#include "comm/base/callback_threads.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/base/thread.h"

namespace dpcore {

struct CallbackThreads::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable ended;
  std::deque<std::function<void()>> queue;
  std::vector<std::thread> threads;
  size_t idle = 0;
  size_t serving = 0;
  bool stopping = false;
};

namespace {

thread_local const void* served_here = nullptr;  // whose thread this is

}  // namespace

CallbackThreads::CallbackThreads() : state_(std::make_shared<State>()) {}

CallbackThreads::~CallbackThreads() { stop(); }

// With the mutex.
void CallbackThreads::start_one(const std::shared_ptr<State>& state) {
  state->threads.reserve(kMost);
  state->threads.push_back(
      start_thread("dpcore-callback", "runs what is attached to futures", [state] {
        pthread_setname_np(pthread_self(), "dpcore-callback");
        serve(*state);
      }));
  ++state->serving;
}

void CallbackThreads::be_ready() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->threads.empty() && !state_->stopping) {
    start_one(state_);
  }
}

void CallbackThreads::run(std::function<void()> call) {
  const std::shared_ptr<State> state = state_;  // this object may go with the call
  bool has_stopped = false;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    has_stopped = state->stopping;
    if (!has_stopped) {
      state->queue.push_back(std::move(call));
      if (state->idle < state->queue.size() && state->threads.size() < kMost) {
        try {
          start_one(state);
        } catch (const Error&) {  // one of the others will come to it, or the next call tries again
        }
      }
    }
  }
  if (has_stopped) {
    call();
  } else {
    state->wake.notify_one();
  }
}

void CallbackThreads::serve(State& state) {
  served_here = &state;
  std::unique_lock<std::mutex> lock(state.mutex);
  while (true) {
    ++state.idle;
    state.wake.wait(lock, [&] { return state.stopping || !state.queue.empty(); });
    --state.idle;
    if (state.queue.empty()) {
      break;
    }
    std::function<void()> call = std::move(state.queue.front());
    state.queue.pop_front();
    lock.unlock();
    call();
    call = nullptr;
    lock.lock();
  }
  --state.serving;
  state.ended.notify_all();
}

void CallbackThreads::stop() {
  if (origin_.is_forked_copy()) {
    // The threads live in the parent only: neither joined nor detached, but forgotten. The mutex
    // may have been held when the process was forked.
    (void)new std::shared_ptr<State>(state_);
    return;
  }
  State& state = *state_;
  std::vector<std::thread> threads;
  std::deque<std::function<void()>> left;  // of which no thread could be started
  bool all_ended = false;
  {
    std::unique_lock<std::mutex> lock(state.mutex);
    state.stopping = true;
    threads.swap(state.threads);
    state.wake.notify_all();
    // A callback that stops its own threads waits for none: another one may do the same.
    all_ended = served_here != &state &&
                state.ended.wait_for(lock, kPatience, [&] { return state.serving == 0; });
    if (all_ended) {
      left.swap(state.queue);
    }
  }
  for (std::thread& thread : threads) {
    if (all_ended) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  for (const auto& call : left) {
    call();
  }
}

}  // namespace dpcore
