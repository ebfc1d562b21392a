// all_to_all: every rank has a part for every other one.
#include <algorithm>

#include "comm/base/error.h"
#include "comm/collective/request.h"
#include "torch_backend/backend.h"

namespace dpcore {
namespace {

// torch counts rows of the first dimension; no sizes at all mean equal parts.
Parts elements_of_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows, int world,
                       const char* side) {
  const auto total = static_cast<uint64_t>(tensor.numel());
  if (rows.empty()) {
    const int64_t first = tensor.dim() > 0 ? tensor.size(0) : 0;
    if (first % world != 0) {
      throw Unsupported(
          "all_to_all_single: Tensor's dim 0 does not divide equally across group "
          "size: the " +
          std::string(side) + " has " + std::to_string(first) + " rows for " +
          std::to_string(world) + " ranks; give the sizes");
    }
    return Parts(static_cast<size_t>(world), total / static_cast<uint64_t>(world));
  }
  const bool is_below_0 = std::any_of(rows.begin(), rows.end(), [](int64_t n) { return n < 0; });
  const uint64_t sum = sum_of(Parts(rows.begin(), rows.end()));
  if (is_below_0 || rows.size() != static_cast<size_t>(world) || tensor.dim() == 0 ||
      sum != static_cast<uint64_t>(tensor.size(0))) {
    throw Unsupported("all_to_all_single: Split sizes doesn't match total dim 0 size: the " +
                      std::string(side) +
                      " needs one size per rank, none below 0, that add up to its rows");
  }
  const uint64_t row = sum == 0 ? 0 : total / sum;
  Parts parts;
  for (const int64_t count : rows) {
    parts.push_back(static_cast<uint64_t>(count) * row);
  }
  return parts;
}

// Ranks have to choose alike between equal and given parts, and each knows its own sizes only: so
// equal parts are for callers that gave no sizes.
template <class Call>
Request& ask_exchange(Call& call, const at::Tensor& like, const Parts& inputs, const Parts& outputs,
                      bool sizes_given) {
  const DType dtype = moved_dtype_of(like.scalar_type());
  Request& request = call.ask(Collective::all_to_all, dtype, sizes_given ? 0 : inputs.front());
  if (sizes_given) {
    set_exchanged_parts(request, inputs, outputs);
  }
  return request;
}

}  // namespace

TorchBackend::WorkPtr TorchBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_sizes,
                                                  std::vector<int64_t>& input_sizes,
                                                  const c10d::AllToAllOptions& options) {
  check_tensor(output, "all_to_all_single");
  check_tensor(input, "all_to_all_single");
  if (output.scalar_type() != input.scalar_type()) {
    throw Unsupported("all_to_all_single: output tensor and input tensor must have the same type");
  }
  const bool given = !output_sizes.empty() || !input_sizes.empty();
  Call call = begin(c10d::OpType::ALLTOALL_BASE, "dpcore:all_to_all", input.device(), options);
  const Parts ins = elements_of_rows(input, input_sizes, getSize(), "input");
  const Parts outs = elements_of_rows(output, output_sizes, getSize(), "output");
  if (!given && ins.front() != outs.front()) {
    throw Unsupported("all_to_all_single: the input has " + std::to_string(input.numel()) +
                      " elements, the output " + std::to_string(output.numel()) +
                      "; without sizes they have to be equal");
  }
  Request& request = ask_exchange(call, input, ins, outs, given);
  const bool same_memory = input.is_alias_of(output) && (given || !input.is_same(output));
  request.input = call.staging.read(same_memory ? input.clone() : input);
  request.output = call.staging.write(output);
  call.inputs.push_back(input);
  call.outputs.push_back(output);
  return perform(std::move(call));
}

TorchBackend::WorkPtr TorchBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllToAllOptions& options) {
  const auto world = static_cast<size_t>(getSize());
  if (outputs.size() != world || inputs.size() != world) {
    throw Unsupported("all_to_all: lists of " + std::to_string(inputs.size()) + " inputs and " +
                      std::to_string(outputs.size()) + " outputs; one tensor per rank is needed");
  }
  Call call = begin(c10d::OpType::ALLTOALL, "dpcore:all_to_all", inputs.front().device(), options);
  Parts ins;
  Parts outs;
  for (size_t r = 0; r < world; ++r) {
    check_tensor(inputs[r], "all_to_all");
    check_tensor(outputs[r], "all_to_all");
    if (inputs[r].scalar_type() != inputs.front().scalar_type() ||
        outputs[r].scalar_type() != inputs.front().scalar_type()) {
      throw Unsupported("all_to_all: the tensors have to be of one type");
    }
    ins.push_back(static_cast<uint64_t>(inputs[r].numel()));
    outs.push_back(static_cast<uint64_t>(outputs[r].numel()));
  }
  Request& request = ask_exchange(call, inputs.front(), ins, outs, true);
  const bool same_memory = std::any_of(inputs.begin(), inputs.end(), [&](const auto& input) {
    return std::any_of(outputs.begin(), outputs.end(),
                       [&](const auto& output) { return overlap(input, output); });
  });
  request.input = call.staging.read_joined(same_memory ? clones_of(inputs) : inputs);
  request.output = call.staging.write_joined(outputs);
  call.inputs = inputs;
  call.outputs = outputs;
  call.lists_inputs = call.lists_outputs = true;
  return perform(std::move(call));
}

}  // namespace dpcore
