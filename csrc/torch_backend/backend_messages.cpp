// send, recv, and recv from any rank.
//
// On a device messages meet in the order of the calls, which no tag can change; those of a batch
// travel at the same time (backend_batch.cpp), others one after the other, as with NCCL.
#include "comm/base/error.h"
#include "torch_backend/backend.h"

namespace dpcore {

TorchBackend::WorkPtr TorchBackend::message(bool sends, Tensors& tensors, int peer, int tag) {
  const bool from_any = peer == MessageOperation::kAnyRank;
  const at::Tensor& tensor = only_one(tensors, sends ? "send" : "recv");
  if (!from_any) {
    check_peer(peer, getRank(), getSize());
  }
  if (tag < 0) {
    throw Unsupported("the tag of a message can't be negative, as " + std::to_string(tag) + " is");
  }
  const std::string name = (sends ? "send " : "recv ") + std::to_string(getRank()) +
                           (sends ? "->" : "<-") + (from_any ? "any" : std::to_string(peer));
  Call call{
      sends ? c10d::OpType::SEND : (from_any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV),
      sends ? "dpcore:send" : (from_any ? "dpcore:recvAnySource" : "dpcore:recv"),
      tensor.device(),
      true,
      c10d::kUnsetTimeout,
      staging_for(tensor.device()),
      tensors,
      tensors};
  if (devices_.takes(call.device)) {
    return message_on_device(std::move(call), name, sends, peer, tag);
  }
  std::byte* data = call.staging.of_message(tensor, sends);
  auto work = make_work(call, name, true);
  dpcore::Work operation;
  try {
    operation = state_->communicator->submit_message(
        {sends, peer, static_cast<uint64_t>(tag), moved_dtype_of(tensor.scalar_type()), data,
         static_cast<size_t>(tensor.nbytes()), seconds(call.timeout)});
  } catch (...) {
    work->settle(std::current_exception());
    throw;
  }
  work->follow({std::move(operation)});
  if (Batch* const open = batch()) {
    open->works.push_back(work);
  }
  return work;
}

TorchBackend::WorkPtr TorchBackend::message_on_device(Call&& call, const std::string& name,
                                                      bool sends, int peer, int tag) {
  if (peer == MessageOperation::kAnyRank) {
    throw Unsupported("recv from any rank: messages between devices name their sender; pass src=");
  }
  if (tag != 0) {
    throw Unsupported(
        "messages between devices have no tags: they meet in the order of the calls; "
        "leave tag=" +
        std::to_string(tag) + " out");
  }
  const at::Tensor tensor = call.outputs.front();
  const double timeout = seconds(call.timeout);
  std::byte* data = call.staging.of_message(tensor, sends);
  const StreamMessage one{sends, peer, data, static_cast<size_t>(tensor.nbytes())};
  Batch* const open = batch();
  if (open != nullptr && open->messages_work) {
    if (open->group->device() != call.device) {
      throw Unsupported("a batch of messages has tensors on " + open->group->device().str() +
                        " and " + call.device.str() + "; they have to be on one device");
    }
    open->messages.push_back(one);
    open->messages_work->add(call.outputs, std::move(call.staging));
    return open->messages_work;
  }
  auto work = make_device_work(call, open == nullptr ? name : "coalesced", true);
  if (open != nullptr) {
    open->messages.push_back(one);
    open->messages_work = work;
    open->group = group_on(call.device);
    open->timeout_s = timeout;
    return work;
  }
  try {
    work->started(group_on(call.device)->submit({one}, timeout));
  } catch (...) {
    work->refused();
    throw;
  }
  return work;
}

TorchBackend::WorkPtr TorchBackend::send(Tensors& tensors, int peer, int tag) {
  return message(true, tensors, peer, tag);
}

TorchBackend::WorkPtr TorchBackend::recv(Tensors& tensors, int peer, int tag) {
  if (peer < 0) {
    throw Unsupported("recv from rank " + std::to_string(peer) + ": there is no such rank");
  }
  return message(false, tensors, peer, tag);
}

TorchBackend::WorkPtr TorchBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(false, tensors, MessageOperation::kAnyRank, tag);
}

}  // namespace dpcore
