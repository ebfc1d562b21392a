// Collectives in the order of a stream: the base of communicators for devices.
//
// A call puts work into the communication stream and returns: the stream waits for what the
// caller's stream holds so far, and the caller's stream waits for the result when it is asked to
// (order). No thread waits for a device. A subclass decides what runs in the communication stream:
// NCCL (nccl_communicator.h) or our own kernels.
//
// There is also a communicator on the host over the same ranks, `control`: the ranks use it for
// rendezvous and to know which ranks are alive, and its groups hold the black box.
//
// Captured into a graph, a call is recorded like any other work; it is not watched, since a graph
// runs when no thread calls, and it has no deadline.
//
// Memory: buffers belong to the operation until it is complete, or until its failure is told, which
// waits until nothing in the stream uses them; works are pooled. Threads: any may call, one at a
// time enters (calls_); a watching thread ends what cannot complete. A call leaves the thread's
// current device as it was.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/schedule/choice.h"
#include "comm/schedule/program.h"
#include "cuda/device/device_trace.h"
#include "cuda/stream/stream_moves.h"
#include "cuda/stream/stream_watch.h"

namespace dpcore {

class DoneFlag;

class StreamCommunicator : public std::enable_shared_from_this<StreamCommunicator>,
                           protected StreamWatch::Watched {
 public:
  struct Options {
    double timeout_s = 30.0;
    std::string algorithm = "auto";
    bool deterministic = false;
    Engine::Interrupt interrupt;
    std::shared_ptr<DeviceTrace> trace =
        nullptr;  // null: one of its own; groups share their parent's
  };

  virtual ~StreamCommunicator();

  int rank() const { return control_->rank(); }
  int world() const { return control_->world(); }
  Device& device() const { return *device_; }
  // The communicator on the host over the same ranks, and what its thread sits in.
  const std::shared_ptr<Communicator>& control() const { return control_; }
  TraceRecorder& host_trace() const { return control_->endpoint().trace(); }
  DeviceTrace& trace() const { return *options_.trace; }
  // What the device did since trace().start(). Waits for it, as long as there is hope.
  std::vector<TraceEvent> stop_trace(uint64_t* dropped);
  Group& group() const { return watch_->group(); }
  virtual std::string backend() const = 0;
  // "NCCL 2.27.3 (/.../libnccl.so.2)"
  virtual std::string describe() const = 0;

  // How often operations took which path, where there are several.
  virtual std::map<std::string, uint64_t> paths() { return {}; }

  using Work = std::shared_ptr<StreamWork>;
  Work submit(Request request, const std::string& algorithm, Device::Stream current);
  // Several messages travel at the same time: none waits for one before it.
  Work submit(const std::vector<StreamMessage>& messages, double timeout_s, Device::Stream current);
  // As Communicator::run_by_default().
  void run_by_default(const Schedule& schedule);

  // What comes into `current` from now on waits for the result; the caller does not (but where the
  // caller is the stream).
  void order(const Work& work, Device::Stream current);
  // Blocks the caller. `timeout_s` 0: until the deadline of the operation.
  void wait(const Work& work, double timeout_s, const Engine::Interrupt& interrupt);

  // Keeps memory until the work is complete, when no thread waits for that. It is let go of by a
  // later call, or at the end, on a thread of the program: never by the one that watches.
  void keep(Work work, std::shared_ptr<void> memory);

  // Memory that peers reach without a copy. All ranks call it alike. Null: any memory is as good.
  virtual std::shared_ptr<std::byte> allocate_shared(size_t) { return nullptr; }
  // Memory that will often be used: what the wires need to know of it in advance.
  virtual std::shared_ptr<void> register_memory(std::byte* memory, size_t bytes) = 0;
  // Ranks with the same color, as in Communicator::split; null for a negative one.
  virtual std::shared_ptr<StreamCommunicator> split(int color, int key) = 0;

  void check_usable() const;
  void abort(const std::string& reason);
  void close();
  bool closed() const { return closed_.load() || control_->closed(); }

 protected:
  StreamCommunicator(std::shared_ptr<Communicator> control, std::shared_ptr<Device> device,
                     Options options);

  // For subclasses, in this order, with calls_ held and the device attached:
  // Throws Unsupported while nothing has happened yet; may set request.program.
  virtual void plan(Request& request, const std::string& algorithm) = 0;
  virtual void enqueue(const Request& request) = 0;
  // What the planned request runs, for traces: a literal, "moves" where it has a program.
  virtual const char* path_of(const Request& request) const = 0;
  virtual void enqueue(const std::vector<StreamMessage>& messages) = 0;
  // When nothing is in flight any more; not after stop().
  virtual void release() = 0;

  // Starts to watch; by the subclass when it can answer.
  void watch();
  // Device memory of at least so many bytes, the same for every call: the stream keeps the order.
  std::byte* scratch(size_t bytes);
  std::shared_ptr<Communicator> split_control(int color, int key);
  // For stop(): until nothing in the stream uses a caller's memory any more, or the deadline, when
  // it is false. `calls`: of calls_, locked or not. `meanwhile` is called before each look.
  bool wait_for_stream(std::unique_lock<std::mutex>& calls, int64_t deadline_ns,
                       const std::function<void()>& meanwhile);

  std::shared_ptr<Communicator> control_;
  std::shared_ptr<Device> device_;
  Options options_;
  Device::Stream stream_ = nullptr;
  ProgramCache programs_;
  DoneFlag* done_flag_ = nullptr;          // the subclass's; null: streams wait for events
  bool capturing_ = false;                 // the call that is being made is recorded into a graph
  std::atomic<bool> has_captured_{false};  // a graph may run what was recorded, at any time
  std::mutex calls_;
  std::unique_ptr<StreamWatch> watch_;

 private:
  // `request`: what a collective was planned as; null for messages.
  template <class Enqueue>
  Work run(const Request* request, const Fingerprint& what, uint64_t bytes, std::string message,
           double timeout_s, Device::Stream current, std::unique_lock<std::mutex> calls,
           Enqueue enqueue);
  void end_half_done(const StreamWork& work, std::unique_lock<std::mutex>& calls);
  DeviceTrace::Span begin_span(const StreamWork& work, uint64_t bytes, const Request* request);
  std::unique_lock<std::mutex> enter(Device::Stream current);
  Work take_work();
  const Work* free_work() const;
  void let_go_of_kept(bool all);

  std::shared_ptr<Communicator> black_box_;
  Device::Event entry_ = nullptr;
  uint64_t next_number_ = 0;
  std::vector<Work> pool_;
  size_t pool_at_ = 0;
  std::vector<std::byte*> scratch_;  // the last one is in use, earlier ones may still be
  size_t scratch_bytes_ = 0;
  std::atomic<bool> closed_{false};
  struct Kept {
    Work work;
    std::shared_ptr<void> memory;
  };
  std::mutex keeping_;
  std::vector<Kept> kept_;
  std::atomic<bool> keeps_{false};
};

}  // namespace dpcore
