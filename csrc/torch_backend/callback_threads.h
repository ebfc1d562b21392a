// Threads for what users attach to futures (`work.get_future().then(...)`).
//
// Such code takes Python's lock, starts operations, or waits for others: it can't run on the
// thread that drives operations, which would then drive nothing. It runs here. When all threads
// are busy with callbacks (each of which may wait for the next one) another is started, up to
// kMost; the first of them starts with the first callback.
//
// Threads: all methods from any. A forked child has none of the threads; it forgets them. Loses
// against marking futures on the progress thread by one switch of context.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace dpcore {

class CallbackThreads {
 public:
  static constexpr size_t kMost = 16;

  CallbackThreads();
  ~CallbackThreads();
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  void run(std::function<void()> call);
  // Runs what waits, then ends the threads. Later calls run on their caller's thread. Python's
  // lock must not be held.
  void stop();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stopping_ = false;
  uint64_t fork_generation_;
};

}  // namespace dpcore
