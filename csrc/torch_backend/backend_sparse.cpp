// All-reduce of sparse tensors. Ranks hold different numbers of entries, so they first exchange
// these; then each gathers all indices and values and adds the tensors in the order of the ranks.
//
// It runs on the caller's thread to its end, even if the call is asynchronous: of its three
// operations the later ones depend on the first. The numbers of entries are exchanged on the host,
// even for tensors on a device, since the sizes of buffers depend on them.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>

#include "comm/base/error.h"
#include "comm/collective/request.h"
#include "tensors/tensor_memory.h"
#include "torch_backend/backend.h"

namespace dpcore {

TorchBackend::WorkPtr TorchBackend::allreduce_sparse(Tensors& tensors,
                                                     const c10d::AllreduceOptions& options) {
  if (options.reduceOp.op_ != c10d::ReduceOp::SUM) {
    throw Unsupported("all_reduce of sparse tensors works with ReduceOp.SUM only");
  }
  if (tensors.size() != 1 || tensors.front().layout() != at::kSparse) {
    throw Unsupported("all_reduce of sparse tensors takes one sparse COO tensor");
  }
  const at::Device device = tensors.front().device();
  Call call = begin(c10d::OpType::_ALLREDUCE_SPARSE, "dpcore:sparse_all_reduce", device, options);
  call.inputs = call.outputs = tensors;
  const auto world = static_cast<size_t>(getSize());
  const at::Tensor own = tensors.front().coalesce();
  const double timeout = seconds(options.timeout);
  uint64_t shape = own.sparse_dim();
  for (const int64_t extent : own.sizes()) {
    shape = layout_of({shape, static_cast<uint64_t>(extent)});
  }

  // All ranks' `mine`, one after the other; `parts` elements of each.
  const auto gather = [&](const at::Tensor& mine, const Parts& parts, bool on_host = false) {
    at::Tensor all = at::empty({static_cast<int64_t>(sum_of(parts))}, mine.options());
    Request request;
    request.collective = Collective::all_gather;
    request.dtype = dtype_of(mine.scalar_type(), "all_reduce of a sparse tensor");
    request.layout = shape;
    set_parts(request, parts);
    request.input = static_cast<const std::byte*>(mine.const_data_ptr());
    request.output = static_cast<std::byte*>(all.mutable_data_ptr());
    request.timeout_s = timeout;
    if (request.count > 0 && on_host) {
      state_->communicator->run(std::move(request), {}, state_->interrupt);
    } else if (request.count > 0) {
      run_now(std::move(request), device);
    }
    return all;
  };

  const at::Tensor indices = own.indices().contiguous();
  const at::Tensor values = own.values().contiguous();
  at::Tensor count = at::empty({1}, at::kLong);
  count.fill_(own._nnz());
  const at::Tensor counts = gather(count, Parts(world, 1), true);
  const auto depth = static_cast<uint64_t>(own.sparse_dim());
  Parts index_parts;
  Parts value_parts;
  const int64_t* entries = counts.const_data_ptr<int64_t>();
  uint64_t per_value = 1;
  for (int64_t d = own.sparse_dim(); d < own.dim(); ++d) {
    per_value *= static_cast<uint64_t>(own.size(d));
  }
  for (size_t r = 0; r < world; ++r) {
    index_parts.push_back(depth * static_cast<uint64_t>(entries[r]));
    value_parts.push_back(per_value * static_cast<uint64_t>(entries[r]));
  }
  const at::Tensor all_indices = gather(indices, index_parts);
  const at::Tensor all_values = gather(values, value_parts);

  at::Tensor sum;
  int64_t index_begin = 0;
  int64_t value_begin = 0;
  std::vector<int64_t> value_shape = values.sizes().vec();
  for (size_t r = 0; r < world; ++r) {
    const auto index_count = static_cast<int64_t>(index_parts[r]);
    const auto value_count = static_cast<int64_t>(value_parts[r]);
    value_shape[0] = entries[r];
    const at::Tensor part = at::_sparse_coo_tensor_unsafe(
        all_indices.narrow(0, index_begin, index_count)
            .view({static_cast<int64_t>(depth), entries[r]}),
        all_values.narrow(0, value_begin, value_count).view(value_shape), own.sizes());
    sum = sum.defined() ? sum + part : part;
    index_begin += index_count;
    value_begin += value_count;
  }
  tensors.front().copy_(sum.coalesce());
  if (devices_.takes(device)) {
    auto work = make_device_work(call, "all_reduce", false);
    const std::vector<StreamMessage> nothing;  // a place in the stream behind all that
    work->started(group_on(device)->submit(nothing, timeout));
    return work;
  }
  auto work = make_work(call, "all_reduce", false);
  work->settle();
  return work;
}

}  // namespace dpcore
