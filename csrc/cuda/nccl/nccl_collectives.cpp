// The collectives over NCCL: each as calls of NCCL, or as groups of messages where NCCL has none.
#include "comm/base/error.h"
#include "cuda/nccl/nccl_communicator.h"
#include "cuda/nccl/nccl_types.h"

namespace dpcore {

void NcclCommunicator::begin_group() { check(library_.GroupStart(), "ncclGroupStart"); }

// Waits, if NCCL has to connect two ranks first; not for the messages.
void NcclCommunicator::end_group() { check(library_.GroupEnd(), "ncclGroupEnd"); }

// Within a group a call can only be recorded: in progress is what it is until the group ends. One
// that stays open would keep whatever this thread calls of NCCL from here on.
void NcclCommunicator::check_in_group(int result, const char* call) {
  if (result == nccl::kSuccess || result == nccl::kInProgress) {
    return;
  }
  const std::string why = failure_of(call, result);
  library_.GroupEnd();
  throw Error(why);
}

void NcclCommunicator::begin_call() {
  if (comm_ == nullptr) {
    throw Error(describe() + ": the communicator was aborted");
  }
}

void NcclCommunicator::send(const void* data, size_t bytes, int to) {
  check_in_group(library_.Send(data, bytes, nccl::kInt8, to, comm_, stream_), "ncclSend");
}

void NcclCommunicator::receive(void* data, size_t bytes, int from) {
  check_in_group(library_.Recv(data, bytes, nccl::kInt8, from, comm_, stream_), "ncclRecv");
}

void NcclCommunicator::copy_own(void* to, const void* from, size_t bytes) {
  if (to != from && bytes > 0) {
    device_->copy(stream_, to, from, bytes);
  }
}

void NcclCommunicator::enqueue(const std::vector<StreamMessage>& messages) {
  begin_call();
  put(messages);
}

void NcclCommunicator::enqueue(const Request& request) {
  begin_call();
  if (request.program) {
    run_moves(request, *device_, stream_, *this, [this](size_t bytes) { return scratch(bytes); });
    return;
  }
  switch (request.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::reduce_scatter:
      run_reduction(request);
      break;
    case Collective::broadcast:
    case Collective::all_gather:
      run_copies(request);
      break;
    case Collective::gather:
    case Collective::scatter:
    case Collective::all_to_all:
      run_exchange(request);
      break;
    case Collective::barrier: {
      // The bytes do not count, only that every rank has come.
      auto* byte = scratch(1);
      check(library_.AllReduce(byte, byte, 1, nccl::kInt8, nccl::kSum, comm_, stream_),
            "ncclAllReduce");
      break;
    }
  }
}

// Which algorithm NCCL takes is its secret; exchanges are messages between every two ranks.
const char* NcclCommunicator::path_of(const Request& request) const {
  if (request.program) {
    return path_name::kMoves;
  }
  switch (request.collective) {
    case Collective::gather:
    case Collective::scatter:
    case Collective::all_to_all:
      return path_name::kDirectNccl;
    case Collective::barrier:
      return path_name::kBarrier;
    default:
      return path_name::kNccl;
  }
}

void NcclCommunicator::run_reduction(const Request& request) {
  const nccl::Reduction reduction = *nccl::reduction_of(request.dtype, request.op);
  nccl::RedOp op = reduction.op;
  const bool makes_op = request.op == ReduceOp::premul_sum;
  if (makes_op) {
    nccl::Scalar factor = nccl::scalar_of(reduction.type, request.prescale);
    check(library_.RedOpCreatePreMulSum(&op, &factor, reduction.type, nccl::kHostImmediate, comm_),
          "ncclRedOpCreatePreMulSum");
  }
  const size_t count = request.count * reduction.width;
  const std::byte* in = request.input;
  std::byte* out = request.output;
  if (request.collective == Collective::all_reduce) {
    check(library_.AllReduce(in, out, count, reduction.type, op, comm_, stream_), "ncclAllReduce");
  } else if (request.collective == Collective::reduce) {
    // Only the root's output is written.
    check(library_.Reduce(in, out, count, reduction.type, op, request.root, comm_, stream_),
          "ncclReduce");
  } else if (request.input_parts.empty()) {
    check(library_.ReduceScatter(in, out, count, reduction.type, op, comm_, stream_),
          "ncclReduceScatter");
  } else {
    // Uneven parts: one reduction to each owner, all at the same time.
    begin_group();
    for (int r = 0; r < world(); ++r) {
      const size_t part = part_of(request, request.input_parts, r);
      if (part == 0) {
        continue;
      }
      const std::byte* from =
          in + part_begin_of(request, request.input_parts, r) * size_of(request.dtype);
      check_in_group(
          library_.Reduce(from, out, part * reduction.width, reduction.type, op, r, comm_, stream_),
          "ncclReduce");
    }
    end_group();
  }
  if (makes_op) {
    check(library_.RedOpDestroy(op, comm_), "ncclRedOpDestroy");
  }
}

void NcclCommunicator::run_copies(const Request& request) {
  const size_t element = size_of(request.dtype);
  if (request.collective == Collective::broadcast) {
    check(library_.Broadcast(request.input, request.output, request.count * element, nccl::kInt8,
                             request.root, comm_, stream_),
          "ncclBroadcast");
  } else if (request.output_parts.empty()) {
    check(library_.AllGather(request.input, request.output, request.count * element, nccl::kInt8,
                             comm_, stream_),
          "ncclAllGather");
  } else {
    begin_group();
    for (int r = 0; r < world(); ++r) {
      const size_t bytes = part_of(request, request.output_parts, r) * element;
      if (bytes == 0) {
        continue;
      }
      std::byte* to = request.output + part_begin_of(request, request.output_parts, r) * element;
      check_in_group(library_.Broadcast(request.input, to, bytes, nccl::kInt8, r, comm_, stream_),
                     "ncclBroadcast");
    }
    end_group();
  }
}

// gather, scatter and all_to_all: pieces to and from peers, and the own one as a copy.
void NcclCommunicator::run_exchange(const Request& request) {
  const size_t element = size_of(request.dtype);
  const bool is_root = rank() == request.root;
  const bool all = request.collective == Collective::all_to_all;
  const bool gathers = request.collective == Collective::gather;
  const std::byte* input = request.input;
  if (all && input == request.output && world() > 1) {
    // What leaves must be safe before anything arrives in its place.
    const size_t bytes = request.count * static_cast<size_t>(world()) * element;
    if (bytes == 0) {
      return;
    }
    std::byte* copy = scratch(bytes);
    device_->copy(stream_, copy, input, bytes);
    input = copy;
  }
  const auto sends_to = [&](int r) { return all || (gathers ? r == request.root : is_root); };
  const auto receives_from = [&](int r) { return all || (gathers ? is_root : r == request.root); };
  // A gather has one piece to give, a scatter one to take.
  const auto outgoing = [&](int r) {
    return gathers ? input : input + part_begin_of(request, request.input_parts, r) * element;
  };
  const auto incoming = [&](int r) {
    return all || gathers
               ? request.output + part_begin_of(request, request.output_parts, r) * element
               : request.output;
  };
  const auto bytes_to = [&](int r) {
    return part_of(request, request.input_parts, gathers ? rank() : r) * element;
  };
  const auto bytes_from = [&](int r) {
    return part_of(request, request.output_parts, all || gathers ? r : rank()) * element;
  };
  begin_group();
  for (int r = 0; r < world(); ++r) {
    if (r == rank()) {
      continue;
    }
    if (sends_to(r) && bytes_to(r) > 0) {
      send(outgoing(r), bytes_to(r), r);
    }
    if (receives_from(r) && bytes_from(r) > 0) {
      receive(incoming(r), bytes_from(r), r);
    }
  }
  end_group();
  if (all || is_root) {
    copy_own(incoming(rank()), outgoing(rank()), bytes_from(rank()));
  }
}

}  // namespace dpcore
