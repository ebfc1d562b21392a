// Threads for what users attach to futures (`work.get_future().then(...)`).
//
// Such code takes Python's lock, starts operations, or waits for others: it can't run on the
// thread that drives operations, which would then drive nothing and watch no deadline. It runs
// here. When all threads are busy with callbacks (each of which may wait for the next one)
// another is started, up to kMost; so callbacks may run side by side.
//
// Threads: all methods from any. A thread owns what it needs of this object, which may go while a
// callback runs, also by that callback. A forked child has none of the threads; it forgets them.
// Loses against marking futures on the progress thread by one switch of context.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "comm/base/fork_guard.h"

namespace dpcore {

class CallbackThreads {
 public:
  static constexpr size_t kMost = 16;

  CallbackThreads();
  ~CallbackThreads();
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  // There is a thread from here on. For the thread that attaches a callback: throws an Error where
  // none can be started, which the thread that completes an operation could not report.
  void be_ready();
  // Where no further thread can be started, the call waits for one of those there are.
  void run(std::function<void()> call);
  // Runs what waits, then ends the threads; one whose callback takes longer than kPatience is
  // left to itself. Later calls run on their caller's thread. Python's lock must not be held.
  void stop();

 private:
  static constexpr auto kPatience = std::chrono::seconds(30);

  struct State;
  static void start_one(const std::shared_ptr<State>& state);
  static void serve(State& state);

  std::shared_ptr<State> state_;
  fork_guard::Origin origin_;
};

}  // namespace dpcore
