// send, recv, and recv from any rank.
#include "comm/error.h"
#include "torch_backend/backend.h"

namespace dpcore {

TorchBackend::WorkPtr TorchBackend::message(MessageOperation::Direction direction, Tensors& tensors,
                                            int peer, int tag) {
  const bool sends = direction == MessageOperation::Direction::send;
  const bool from_any = peer == MessageOperation::kAnyRank;
  const at::Tensor& tensor = only_one(tensors, sends ? "send" : "recv");
  if (!from_any && (peer < 0 || peer >= getSize() || peer == getRank())) {
    throw Unsupported("rank " + std::to_string(getRank()) + " can't exchange a message with rank " +
                      std::to_string(peer) + ": choose another rank of 0.." +
                      std::to_string(getSize() - 1));
  }
  if (tag < 0) {
    throw Unsupported("the tag of a message can't be negative, as " + std::to_string(tag) + " is");
  }
  const MovedAs moved = moved_as(tensor);
  const std::string own = std::to_string(getRank());
  const std::string whom = from_any ? "any" : std::to_string(peer);
  Call call{
      sends ? c10d::OpType::SEND : (from_any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV),
      sends ? "dpcore:send" : (from_any ? "dpcore:recvAnySource" : "dpcore:recv"),
      true,
      c10d::kUnsetTimeout,
      Staging(state_->communicator),
      tensors,
      tensors,
      {}};
  std::byte* data =
      sends ? const_cast<std::byte*>(call.staging.read(tensor)) : call.staging.write(tensor);
  auto work = make_work(
      call, sends ? "gloo:send " + own + "->" + whom : "gloo:recv " + own + "<-" + whom, true);
  work->follow({state_->communicator->submit_message(
      direction, peer, static_cast<uint64_t>(tag), moved.dtype, data,
      static_cast<size_t>(tensor.nbytes()), seconds(call.timeout))});
  return work;
}

TorchBackend::WorkPtr TorchBackend::send(Tensors& tensors, int peer, int tag) {
  return message(MessageOperation::Direction::send, tensors, peer, tag);
}

TorchBackend::WorkPtr TorchBackend::recv(Tensors& tensors, int peer, int tag) {
  if (peer < 0) {
    throw Unsupported("recv from rank " + std::to_string(peer) + ": there is no such rank");
  }
  return message(MessageOperation::Direction::receive, tensors, peer, tag);
}

TorchBackend::WorkPtr TorchBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(MessageOperation::Direction::receive, tensors, MessageOperation::kAnyRank, tag);
}

}  // namespace dpcore
