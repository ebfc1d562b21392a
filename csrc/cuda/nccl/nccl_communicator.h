// Collectives over NCCL, in the order of a stream.
//
// What NCCL has it does: sums, products, minima, maxima, means and premultiplied sums of the types
// it knows, and everything that only moves bytes. The rest (bits, int16, products of complex
// numbers, exclusive or) and every algorithm that is asked for as a list of moves ("ring/moves", or
// a dpcore.Schedule) runs over ncclSend and ncclRecv with our kernels, from the same schedules as
// on the CPU.
//
// Which algorithm NCCL takes is its own choice, or fixed when the communicator is made ("ring",
// "tree"): NCCL reads that then, and never again.
//
// The communicator is non-blocking: a call of NCCL that has to wait for another rank says so, and
// we look at the deadline, at the peers and at NCCL's own errors between two questions. A failure
// anywhere aborts it; buffers are safe afterwards, their contents are not.
//
// Minima and maxima treat NaN as NCCL does, which need not be the way of the CPU.
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
