// Collectives over NCCL, in the order of a stream.
//
// NCCL does all that it supports: sums, products, minima, maxima, means and premultiplied sums of
// its types, and everything that only moves bytes. The rest (bitwise operators, int16, products of
// complex numbers) and every algorithm that is requested as a list of moves ("ring/moves", or a
// dpcore.Schedule) runs over ncclSend and ncclRecv with our kernels, from the same schedules as on
// the CPU.
//
// NCCL chooses its algorithm itself, unless one ("ring", "tree") is fixed when the communicator is
// made, the only time at which NCCL reads that setting.
//
// The communicator is non-blocking: a call of NCCL that must wait for another rank returns, and we
// check the deadline, the peers and NCCL's own errors before we poll it again. A failure anywhere
// aborts it; then buffers may be freed, but their contents are undefined.
//
// Minima and maxima treat NaN as NCCL does, which may differ from the CPU.
#pragma once

#include <atomic>

#include "cuda/nccl/nccl_library.h"
#include "cuda/stream/stream_communicator.h"
#include "cuda/stream/stream_moves.h"

namespace dpcore {

class NcclCommunicator final : public StreamCommunicator, private StreamMessages {
 public:
  // The ranks of `control` meet. `wheels`: where the library may be. Throws RendezvousError when
  // ranks found different versions, Unsupported when NCCL can't serve these ranks.
  static std::shared_ptr<NcclCommunicator> start(std::shared_ptr<Communicator> control,
                                                 std::shared_ptr<Device> device, Options options,
                                                 const std::vector<std::string>& wheels);
  ~NcclCommunicator() override;

  std::string backend() const override { return "nccl"; }
  std::string describe() const override { return library_.describe(); }
  std::shared_ptr<void> register_memory(std::byte* memory, size_t bytes) override;
  std::shared_ptr<StreamCommunicator> split(int color, int key) override;

 private:
  NcclCommunicator(std::shared_ptr<Communicator> control, std::shared_ptr<Device> device,
                   Options options, const nccl::Library& library);
  void meet();
  void compare_with_others();
  void exchange_and_connect();
  void connect(const nccl::UniqueId& id);

  void plan(Request& request, const std::string& algorithm) override;
  void enqueue(const Request& request) override;
  const char* path_of(const Request& request) const override;
  void enqueue(const std::vector<StreamMessage>& messages) override;
  StreamWatch::Trouble trouble() override;
  void stop() override;
  void release() override;

  // StreamMessages
  void begin_group() override;
  void send(const void* data, size_t bytes, int to) override;
  void receive(void* data, size_t bytes, int from) override;
  void end_group() override;

  void run_reduction(const Request& request);
  void run_copies(const Request& request);
  void run_exchange(const Request& request);
  void copy_own(void* to, const void* from, size_t bytes);

  void check(int result, const char* call);
  void check_in_group(int result, const char* call);
  void begin_call();
  void settle(const char* call, int64_t deadline_ns);
  int asynchronous_state();
  // Which library, which call, and why: "NCCL 2.27.3 (/.../libnccl.so.2), ncclSend: ..."
  std::string failure_of(const char* call, int result) const;
  std::string last_error(int result) const;

  const nccl::Library& library_;
  std::atomic<nccl::CommPtr> comm_ = nullptr;  // null before it is made, and after stop()
};

}  // namespace dpcore
