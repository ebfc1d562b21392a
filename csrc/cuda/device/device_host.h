// A device whose memory is the host's and whose streams are threads.
//
// It is slow and it is not for training: it makes the communicators for GPUs run where there is
// none. A stream does its work later than it is asked to, as a GPU does, so that an order that
// the program did not ask for is an order that does not hold. Work comes as functions, also from a
// stand-in for NCCL that tests load (tests/cuda_host).
//
// Calls are refused where a GPU's would fail or go to another one: by a thread that has not made
// the device current, and on flags in pages that were not mapped.
//
// Memory: a stream owns its queue; destroying it waits for the queue. Threads: one per stream; a
// mutex each, which nothing that is timed goes through.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "cuda/device/device.h"

namespace dpcore {

class HostStream {
 public:
  HostStream() : thread_([this] { run(); }) {}
  // Virtual, so that a library which is loaded at run time needs no symbol of this one.
  virtual ~HostStream() {
    add(nullptr);
    thread_.join();
  }
  virtual void add(std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.size() < kRoom; });
    ++unfinished_;
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

  bool is_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return unfinished_ == 0;
  }

 private:
  static constexpr size_t kRoom = 1024;  // a thread that comes then waits, as for a GPU's queue

  void run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      changed_.notify_all();
      lock.unlock();
      if (!work) {
        return;
      }
      work();
      work = nullptr;
      lock.lock();
      --unfinished_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  size_t unfinished_ = 0;  // in the queue, or taken out of it and running
  std::thread thread_;     // last: it uses what stands above
};

// `uuid`: devices with equal ones count as one GPU that several ranks share.
std::shared_ptr<Device> host_device(std::string uuid);

// The one that calls of this thread are for; null where there is none.
const Device* current_host_device();

}  // namespace dpcore
