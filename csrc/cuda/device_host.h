// A device whose memory is the host's and whose streams are threads.
//
// It is slow and it is not for training: it makes the communicators for GPUs run where there is
// none. A stream does its work later than it is asked to, as a GPU does, so that an order that
// nobody has asked for is an order that does not hold. Work comes as functions, also from a
// stand-in for NCCL that tests load (tests/cuda_host).
//
// Memory: a stream owns its queue; destroying it waits for the queue. Threads: one per stream; a
// mutex each, which nothing that is timed goes through.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "cuda/device.h"

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
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work) return;
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;  // last: it uses what stands above
};

// `uuid`: devices with equal ones count as one GPU that several ranks share.
std::shared_ptr<Device> host_device(std::string uuid);

}  // namespace dpcore
