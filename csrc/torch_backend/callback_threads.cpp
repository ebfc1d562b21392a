// See callback_threads.h. The last reference to this object may go in one of its own threads.
#include "torch_backend/callback_threads.h"

#include <pthread.h>

#include "comm/fork_guard.h"

namespace dpcore {

CallbackThreads::CallbackThreads() : fork_generation_(fork_guard::generation()) {}

CallbackThreads::~CallbackThreads() { stop(); }

void CallbackThreads::run(std::function<void()> call) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopping_) {
    lock.unlock();
    call();
    return;
  }
  queue_.push_back(std::move(call));
  if (idle_ < queue_.size() && threads_.size() < kMost) {
    threads_.emplace_back([this] { serve(); });
  }
  lock.unlock();
  wake_.notify_one();
}

void CallbackThreads::serve() {
  pthread_setname_np(pthread_self(), "dpcore-callback");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) {
      return;
    }
    std::function<void()> call = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    call();
    call = nullptr;
    lock.lock();
  }
}

void CallbackThreads::stop() {
  if (fork_guard::generation() != fork_generation_) {
    // The threads live in the parent only: neither joined nor detached, but forgotten. The mutex
    // may have been held when the process was forked.
    (void)new std::vector<std::thread>(std::move(threads_));
    return;
  }
  std::vector<std::thread> threads;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

}  // namespace dpcore
