// Collectives with a part per rank. A list of tensors becomes one buffer (staging.h); parts may
// have different sizes where every rank knows all of them.
#include "comm/base/error.h"
#include "comm/collective/request.h"
#include "torch_backend/backend.h"

namespace dpcore {
namespace {

using Tensors = std::vector<at::Tensor>;

void expect(bool holds, const char* operation, const std::string& what) {
  if (!holds) {
    throw Unsupported(std::string(operation) + ": " + what);
  }
}

void check_parts(const Tensors& parts, const at::Tensor& like, int world, const char* operation) {
  expect(parts.size() == static_cast<size_t>(world), operation,
         "a list has " + std::to_string(parts.size()) + " tensors; one per rank is needed (" +
             std::to_string(world) + ")");
  for (const at::Tensor& part : parts) {
    check_tensor(part, operation);
    expect(part.scalar_type() == like.scalar_type(), operation,
           std::string("tensors are of the types ") + c10::toString(like.scalar_type()) + " and " +
               c10::toString(part.scalar_type()) + "; they have to be of one");
  }
}

const Tensors& only_list(const std::vector<Tensors>& lists, const char* operation) {
  expect(lists.size() == 1, operation, "several devices per rank are not supported");
  return lists.front();
}

// Sizes of a list of parts; as one count where they are equal. Whether they are.
bool set_sizes(Request& request, const Tensors& parts) {
  Parts sizes;
  for (const at::Tensor& part : parts) {
    sizes.push_back(static_cast<uint64_t>(part.numel()));
  }
  if (std::equal(sizes.begin() + 1, sizes.end(), sizes.begin())) {
    request.count = sizes.front();
    return true;
  }
  set_parts(request, sizes);
  return false;
}

void expect_equal(const Tensors& parts, const at::Tensor& own, const char* operation) {
  for (const at::Tensor& part : parts) {
    expect(part.numel() == own.numel(), operation,
           "the tensors of the list have to be as large as this rank's (" +
               std::to_string(own.numel()) + " elements), one has " + std::to_string(part.numel()));
  }
}

// What may share memory: the smaller tensor, when it is this rank's part of the larger one.
bool is_apart(const at::Tensor& small, const at::Tensor& large, int rank) {
  const auto* first = static_cast<const std::byte*>(small.const_data_ptr());
  const auto* whole = static_cast<const std::byte*>(large.const_data_ptr());
  return !overlap(small, large) || first == whole + static_cast<size_t>(rank) * small.nbytes();
}

// The same, of a list of parts. Those with gaps are copied anyway.
bool is_apart(const at::Tensor& small, const Tensors& parts, int rank) {
  for (size_t r = 0; r < parts.size(); ++r) {
    if (r != static_cast<size_t>(rank) && overlap(small, parts[r])) {
      return false;
    }
  }
  return true;
}

void check_base(const at::Tensor& part, const at::Tensor& whole, int world, const char* operation) {
  check_tensor(part, operation);
  check_tensor(whole, operation);
  expect(part.scalar_type() == whole.scalar_type(), operation,
         std::string("input and output are of the types ") + c10::toString(part.scalar_type()) +
             " and " + c10::toString(whole.scalar_type()) + "; they have to be of one");
  expect(whole.numel() == part.numel() * world, operation,
         "the larger tensor has " + std::to_string(whole.numel()) + " elements, the smaller one " +
             std::to_string(part.numel()) + "; it needs " + std::to_string(world) +
             " times as many, one part per rank");
}

template <class Function>
void for_each_pair(const Tensors& outputs, const Tensors& inputs, const char* operation,
                   Function call) {
  expect(outputs.size() == inputs.size(), operation, "as many outputs as inputs are needed");
  for (size_t i = 0; i < inputs.size(); ++i) {
    call(outputs[i], inputs[i]);
  }
}

}  // namespace

// ---- all_gather -------------------------------------------------------------------------------

void TorchBackend::add_all_gather(Call& call, const Tensors& outputs,
                                  const at::Tensor& input) const {
  constexpr const char* kName = "all_gather";
  check_tensor(input, kName);
  check_parts(outputs, input, getSize(), kName);
  expect(outputs[static_cast<size_t>(getRank())].numel() == input.numel(), kName,
         "invalid tensor size: the output of this rank has another number of elements than its "
         "input");
  Request& request = call.ask(Collective::all_gather, moved_dtype_of(input.scalar_type()));
  call.lists_outputs = true;
  call.uneven = !set_sizes(request, outputs) || call.uneven;
  request.input = call.staging.read(is_apart(input, outputs, getRank()) ? input : input.clone());
  request.output = call.staging.write_joined(outputs);
  call.inputs.push_back(input);
  call.outputs.insert(call.outputs.end(), outputs.begin(), outputs.end());
}

void TorchBackend::add_all_gather(Call& call, const at::Tensor& output,
                                  const at::Tensor& input) const {
  check_base(input, output, getSize(), "all_gather_into_tensor");
  Request& request = ask_to_move(call, Collective::all_gather, input);
  request.input = call.staging.read(is_apart(input, output, getRank()) ? input : input.clone());
  request.output = call.staging.write(output);
  call.inputs.push_back(input);
  call.outputs.push_back(output);
}

TorchBackend::WorkPtr TorchBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  Call call = begin(c10d::OpType::ALLGATHER, "dpcore:all_gather", device_of(inputs), options);
  add_all_gather(call, only_list(outputs, "all_gather"), only_one(inputs, "all_gather"));
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  Call call =
      begin(c10d::OpType::ALLGATHER_COALESCED, "dpcore:all_gather", device_of(inputs), options);
  expect(outputs.size() == static_cast<size_t>(getSize()), "all_gather_coalesced",
         "one list of outputs per rank is needed");
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_input;
    for (const Tensors& of_rank : outputs) {
      expect(of_rank.size() == inputs.size(), "all_gather_coalesced",
             "invalid output size: every list needs as many tensors as there are inputs");
      of_input.push_back(of_rank[i]);
    }
    add_all_gather(call, of_input, inputs[i]);
  }
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  Call call = begin(c10d::OpType::_ALLGATHER_BASE, "dpcore:all_gather", input.device(), options);
  add_all_gather(call, output, input);
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  Call call = begin(c10d::OpType::COALESCED, "dpcore:all_gather", device_of(inputs), options);
  for_each_pair(
      outputs, inputs, "all_gather_into_tensor_coalesced",
      [&](const at::Tensor& out, const at::Tensor& in) { add_all_gather(call, out, in); });
  return perform(std::move(call));
}

// ---- gather and scatter -----------------------------------------------------------------------

TorchBackend::WorkPtr TorchBackend::gather(TensorLists& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  const at::Tensor& input = only_one(inputs, "gather");
  const bool takes = options.rootRank == getRank();
  Call call = begin(c10d::OpType::GATHER, "dpcore:gather", input.device(), options);
  Request& request = ask_to_move(call, Collective::gather, input);
  request.root = static_cast<int>(options.rootRank);
  if (takes) {
    const Tensors& parts = only_list(outputs, "gather");
    check_parts(parts, input, getSize(), "gather");
    expect_equal(parts, input, "gather");
    request.input = call.staging.read(is_apart(input, parts, getRank()) ? input : input.clone());
    request.output = call.staging.write_joined(parts);
    call.outputs = parts;
    call.lists_outputs = true;
  } else {
    expect(outputs.empty() || outputs.front().empty(), "gather",
           "a rank that is not the root passes no list of outputs");
    request.input = call.staging.read(input);
  }
  call.inputs = inputs;
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                            const c10d::ScatterOptions& options) {
  const at::Tensor& output = only_one(outputs, "scatter");
  Call call = begin(c10d::OpType::SCATTER, "dpcore:scatter", output.device(), options);
  Request& request = ask_to_move(call, Collective::scatter, output);
  request.root = static_cast<int>(options.rootRank);
  if (options.rootRank == getRank()) {
    const Tensors& parts = only_list(inputs, "scatter");
    check_parts(parts, output, getSize(), "scatter");
    expect_equal(parts, output, "scatter");
    request.input =
        call.staging.read_joined(is_apart(output, parts, getRank()) ? parts : clones_of(parts));
    call.inputs = parts;
    call.lists_inputs = true;
  } else {
    expect(inputs.empty() || inputs.front().empty(), "scatter",
           "a rank that is not the root passes no list of inputs");
  }
  request.output = call.staging.write(output);
  call.outputs = outputs;
  return perform(std::move(call));
}

// ---- reduce_scatter ---------------------------------------------------------------------------

void TorchBackend::add_reduce_scatter(Call& call, const at::Tensor& output, const at::Tensor& input,
                                      const c10d::ReduceOp& op) const {
  check_base(output, input, getSize(), "reduce_scatter_tensor");
  Request& request = ask_to_reduce(call, Collective::reduce_scatter, output, op);
  request.input = call.staging.read(is_apart(output, input, getRank()) ? input : input.clone());
  request.output = call.staging.write(output);
  call.inputs.push_back(input);
  call.outputs.push_back(output);
}

TorchBackend::WorkPtr TorchBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only_one(outputs, "reduce_scatter");
  const Tensors& parts = only_list(inputs, "reduce_scatter");
  check_parts(parts, output, getSize(), "reduce_scatter");
  expect(parts[static_cast<size_t>(getRank())].numel() == output.numel(), "reduce_scatter",
         "the output has another number of elements than this rank's part of the input");
  Call call =
      begin(c10d::OpType::REDUCE_SCATTER, "dpcore:reduce_scatter", output.device(), options);
  Request& request = ask_to_reduce(call, Collective::reduce_scatter, output, options.reduceOp);
  call.lists_inputs = true;
  call.uneven = !set_sizes(request, parts);
  request.input =
      call.staging.read_joined(is_apart(output, parts, getRank()) ? parts : clones_of(parts));
  request.output = call.staging.write(output);
  call.inputs = parts;
  call.outputs = outputs;
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Call call =
      begin(c10d::OpType::_REDUCE_SCATTER_BASE, "dpcore:reduce_scatter", input.device(), options);
  add_reduce_scatter(call, output, input, options.reduceOp);
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  Call call = begin(c10d::OpType::COALESCED, "dpcore:reduce_scatter", device_of(inputs), options);
  for_each_pair(outputs, inputs, "reduce_scatter_tensor_coalesced",
                [&](const at::Tensor& out, const at::Tensor& in) {
                  add_reduce_scatter(call, out, in, options.reduceOp);
                });
  return perform(std::move(call));
}

}  // namespace dpcore
