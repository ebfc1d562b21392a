// Of a rank: the communicator and the memory that the checks of gpus.cpp have in common.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../../cpp/check.h"
#include "comm/base/error.h"
#include "cuda/mapped/mapped_communicator.h"
#include "fake_cuda.h"

namespace dpcore::gpus {

using Comm = std::shared_ptr<MappedCommunicator>;

// A tensor on a device, of the program's own or of the communicator's memory.
class Tensor {
 public:
  Tensor(Device& device, size_t count) : device_(&device), count_(count) {
    const DeviceGuard here(device);
    own_ = device.allocate(count * sizeof(float));
    data_ = own_;
  }
  Tensor(MappedCommunicator& comm, size_t count)
      : count_(count), shared_(comm.allocate_shared(count * sizeof(float))), data_(shared_.get()) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (own_ == nullptr) {
      return;
    }
    const DeviceGuard here(*device_);
    device_->release(own_);
  }
  std::byte* data() const { return data_; }
  size_t count() const { return count_; }
  void fill(float value) {
    const std::vector<float> host(count_, value);
    fake_cuda::write(data_, host.data(), count_ * sizeof(float));
  }
  bool holds(float value) const {
    std::vector<float> host(count_);
    fake_cuda::read(host.data(), data_, count_ * sizeof(float));
    return std::all_of(host.begin(), host.end(), [&](float x) { return x == value; });
  }

 private:
  Device* device_ = nullptr;
  size_t count_;
  std::byte* own_ = nullptr;
  std::shared_ptr<std::byte> shared_;
  std::byte* data_;
};

inline StreamCommunicator::Work all_reduce(MappedCommunicator& comm, const Tensor& tensor,
                                           Device::Stream current,
                                           const std::string& algorithm = "") {
  Request request;
  request.collective = Collective::all_reduce;
  request.dtype = DType::f32;
  request.count = tensor.count();
  request.input = request.output = tensor.data();
  return comm.submit(std::move(request), algorithm, current);
}

struct Job {
  std::string name;
  int world = 2;
  int gpus = 1;
  bool threads = true;
  double timeout_s = 30.0;
};

inline std::shared_ptr<Communicator> meet(const Job& job, int rank) {
  Options options;
  options.job = job.name;
  options.rank = rank;
  options.world = job.world;
  options.threads = job.threads;
  options.timeout_s = job.timeout_s;
  return Communicator::start(options);
}

inline StreamCommunicator::Options settings_of(const Job& job) {
  return {job.timeout_s, "auto", false, nullptr};
}

inline Comm join(const Job& job, int rank) {
  return MappedCommunicator::start(meet(job, rank), cuda_device(rank % job.gpus), settings_of(job));
}

// What a program has: a device that is current, and a stream of its own.
class Program {
 public:
  explicit Program(Device& device)
      : device_(device), here_(device), stream_(device.make_stream()) {}
  ~Program() {
    device_.synchronize(stream_);
    device_.destroy_stream(stream_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  Device::Stream stream() const { return stream_; }

 private:
  Device& device_;
  DeviceGuard here_;
  Device::Stream stream_;
};

// The barrier of the ranks and how they hand over memory, or "auto": of communicators that are made
// from here on.
inline void choose(const std::string& barrier, const std::string& memory) {
  setenv("DPCORE_CUDA_SYNC", barrier == "auto" ? "" : barrier.c_str(), 1);
  setenv("DPCORE_CUDA_MEMORY", memory == "auto" ? "" : memory.c_str(), 1);
}

inline void nothing_is_left() {
  const std::string left = fake_cuda::left_behind();
  if (!left.empty()) {
    std::fprintf(stderr, "left behind:\n%s", left.c_str());
  }
  CHECK(left.empty());
}

// A rank in a process of its own, with the status that it ends with.
template <class Rank>
std::vector<int> statuses_of(int world, Rank run) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      run(rank);
      std::exit(0);
    }
    children.push_back(child);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    statuses.push_back(status);
  }
  return statuses;
}

// ---- the checks
// ----------------------------------------------------------------------------------

void one_device();
void as_threads(const Job& job, const std::string& barrier, const std::string& memory);
void as_processes(const Job& job, const std::string& barrier, const std::string& memory);
void graphs(int world);
void over_nccl(int world);
void a_kernel_that_waits_in_vain();
void a_process_is_killed(const std::string& barrier);
void fallbacks();

}  // namespace dpcore::gpus
