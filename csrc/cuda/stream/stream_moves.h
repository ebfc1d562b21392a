// A schedule's list of moves in the order of a stream: each step is one group of messages, and what
// has to be added is added behind it by a kernel. No thread waits for any of it.
//
// The same Program as over mailboxes and TCP (comm/schedule/program.h), with the same operands in
// the same order and the same roundings, so a ring on GPUs gives the bits of the ring on CPUs.
// There are no segments: the transport cuts its messages itself. What a step costs more than
// there is that its additions wait for all of its messages.
//
// One factor is handled otherwise: a rank knows only its own of a premultiplied sum, so it scales
// before it sends, also where the CPU's ordered algorithms would scale on arrival.
//
// Memory: scratch is asked for by size and given by the caller, until the stream has passed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/collective/geometry.h"
#include "cuda/device/device.h"

namespace dpcore {

struct StreamMessage {
  bool sends = false;
  int peer = 0;
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// Messages between ranks, as work in a stream. Those of one group travel at the same time; between
// two ranks they meet in the order of the calls.
class StreamMessages {
 public:
  virtual ~StreamMessages() = default;
  // All in one group.
  void put(const std::vector<StreamMessage>& messages) {
    begin_group();
    for (const StreamMessage& message : messages) {
      if (message.sends) {
        send(message.data, message.bytes, message.peer);
      } else {
        receive(message.data, message.bytes, message.peer);
      }
    }
    end_group();
  }
  virtual void begin_group() = 0;
  virtual void send(const void* data, size_t bytes, int to) = 0;
  virtual void receive(void* data, size_t bytes, int from) = 0;
  virtual void end_group() = 0;
};

using Scratch = std::function<std::byte*(size_t bytes)>;

// What "auto" is among these messages, whose costs have not been measured: 2 steps and 2(N-1)/N of
// the data, the fewest bytes there are; with two ranks that have a root a single step does.
std::string algorithm_of_fewest_bytes(Collective collective, int world);

// Puts the whole execution of request.program into the stream.
void run_moves(const Request& request, Device& device, Device::Stream stream,
               StreamMessages& messages, const Scratch& scratch);

}  // namespace dpcore
