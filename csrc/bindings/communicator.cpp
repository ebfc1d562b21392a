// dpcore._C.Communicator: collectives on Python objects. The package's Communicator adds the
// signatures and the documentation; here buffers are checked and the GIL is let go.
#include "comm/communicator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <numeric>
#include <string>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/observe.h"
#include "bindings/py_work.h"
#include "comm/error.h"
#include "comm/schedule.h"

namespace py = pybind11;

namespace dpcore {
namespace {

using Parts = std::vector<uint64_t>;

struct Call {  // the optional arguments that all collectives share
  std::string algorithm;
  std::shared_ptr<const Program> program;
  int priority = 0;
  double timeout = 0;
  uint64_t layout = 0;
  bool asynchronous = false;
};

Call call_of(PyCommunicator& comm, const py::object& algorithm, int priority, double timeout,
             uint64_t layout, bool asynchronous) {
  Call call{{}, nullptr, priority, timeout, layout, asynchronous};
  if (py::isinstance<Schedule>(algorithm)) {
    call.program = comm.core->program_of(algorithm.cast<const Schedule&>());
  } else if (py::isinstance<py::str>(algorithm)) {
    call.algorithm = algorithm.cast<std::string>();
  } else if (!algorithm.is_none()) {
    throw py::type_error(std::string("algorithm: expected a name or a dpcore.Schedule, not ") +
                         Py_TYPE(algorithm.ptr())->tp_name);
  }
  return call;
}

py::object perform(const std::shared_ptr<PyCommunicator>& comm, Request&& request, const Call& call,
                   std::vector<py::object> buffers) {
  request.priority = call.priority;
  request.timeout_s = call.timeout;
  request.program = call.program;
  if (call.program && call.program->schedule.collective != request.collective) {
    throw Unsupported("this schedule is for " +
                      std::string(name_of(call.program->schedule.collective)) + ", not for " +
                      std::string(name_of(request.collective)));
  }
  if (call.program && call.program->schedule.world != comm->core->world()) {
    throw Unsupported("this schedule is for a world of " +
                      std::to_string(call.program->schedule.world));
  }
  if (call.program && call.program->schedule.root != request.root) {
    throw Unsupported("this schedule is for root " + std::to_string(call.program->schedule.root) +
                      ", not for root " + std::to_string(request.root));
  }
  if (call.asynchronous) {
    comm->let_go_of_completed();
    Work operation;
    {
      const py::gil_scoped_release no_gil;
      operation = comm->core->submit(std::move(request), call.algorithm);
    }
    return py::cast(std::make_shared<PyWork>(comm, std::move(operation), std::move(buffers)));
  }
  const py::gil_scoped_release no_gil;
  comm->core->run(std::move(request), call.algorithm, check_signals);
  return py::none();
}

void expect(size_t have, size_t want, const char* role, const char* why) {
  if (have != want) {
    throw Unsupported(std::string(role) + " has " + std::to_string(have) + " elements, " +
                      std::to_string(want) + " are needed: " + why);
  }
}

uint64_t sum_of(const Parts& parts) {
  return std::accumulate(parts.begin(), parts.end(), uint64_t{0});
}

uint64_t hash_of(const Parts& parts) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const uint64_t part : parts) {
    hash = (hash ^ part) * 0x100000001b3ull;
  }
  return hash | 1;
}

// Input and output may share memory where nothing is written that is still to be read: when the
// smaller one is this rank's part of the larger one, and for an exchange of equal parts.
void check_overlap(Collective kind, const Buffer& in, const Buffer& out, size_t rank,
                   const Request& request) {
  const size_t element = size_of(in.dtype);
  const std::byte* in_end = in.data + in.elements * element;
  const std::byte* out_end = out.data + out.elements * element;
  if (in.elements == 0 || out.elements == 0 || in_end <= out.data || out_end <= in.data) {
    return;
  }
  const Parts& parts = request.input_parts;
  const size_t begin =
      parts.empty() ? request.count * rank
                    : std::accumulate(parts.begin(), parts.begin() + static_cast<ptrdiff_t>(rank),
                                      uint64_t{0});
  const std::byte* smaller = in.data;
  const std::byte* larger = out.data;
  if (kind == Collective::reduce_scatter || kind == Collective::scatter) {
    std::swap(smaller, larger);
  }
  const bool exchanges = kind == Collective::all_to_all;
  if (exchanges ? in.data == out.data && parts.empty() : smaller == larger + begin * element) {
    return;
  }
  throw Unsupported(std::string("input and output overlap; ") +
                    (exchanges ? "in place they have to be the same buffer, with equal parts"
                               : "in place the smaller one has to be this rank's part of the "
                                 "larger one"));
}

// all_reduce, broadcast, reduce: one shape everywhere. `input` None: in place.
py::object whole(const std::shared_ptr<PyCommunicator>& comm, Collective kind, py::object output,
                 py::object input, const std::string& op, double factor, int root,
                 const Call& call) {
  Request request;
  request.collective = kind;
  const Buffer out = buffer_of(output, "tensor", Access::write);
  const Buffer in = input.is_none() ? out : buffer_of(input, "input", Access::read);
  if (in.dtype != out.dtype) {
    throw Unsupported("input is " + std::string(name_of(in.dtype)) + ", output is " +
                      std::string(name_of(out.dtype)));
  }
  expect(out.elements, in.elements, "the output", "as many as the input");
  request.dtype = in.dtype;
  request.op = parse_reduce_op(op);
  request.root = root;
  request.input = in.data;
  request.output = out.data;
  request.count = in.elements;
  request.prescale = factor;
  request.layout = call.layout;
  return perform(comm, std::move(request), call, {std::move(output), std::move(input)});
}

// The common case by itself: in place, all options as they are, and waiting. Every argument and
// every object that need not be made is time.
void all_reduce_now(PyCommunicator& comm, py::handle tensor, std::string_view op) {
  const Buffer buffer = buffer_of(tensor, "tensor", Access::write);
  Request request;
  request.collective = Collective::all_reduce;
  request.dtype = buffer.dtype;
  request.op = parse_reduce_op(op);
  request.input = request.output = buffer.data;
  request.count = buffer.elements;
  const py::gil_scoped_release no_gil;
  comm.core->run(std::move(request), {}, check_signals);
}

// The others: a part per rank. On ranks without an input or output it is None.
py::object parted(const std::shared_ptr<PyCommunicator>& comm, Collective kind, py::object output,
                  py::object input, const std::string& op, double factor, int root,
                  const std::optional<Parts>& input_parts, const std::optional<Parts>& output_parts,
                  const Call& call) {
  const auto world = static_cast<size_t>(comm->core->world());
  const auto rank = static_cast<size_t>(comm->core->rank());
  Request request;
  request.collective = kind;
  request.op = parse_reduce_op(op);
  request.root = root;
  request.prescale = factor;
  request.layout = call.layout;
  std::optional<Buffer> in;
  std::optional<Buffer> out;
  if (!input.is_none() || kind != Collective::scatter) {
    in = buffer_of(input, "input", Access::read);
    request.input = in->data;
    request.dtype = in->dtype;
  }
  if (!output.is_none() || kind != Collective::gather) {
    out = buffer_of(output, "output", Access::write);
    request.output = out->data;
    request.dtype = out->dtype;
  }
  if (in && out && in->dtype != out->dtype) {
    throw Unsupported("input is " + std::string(name_of(in->dtype)) + ", output is " +
                      std::string(name_of(out->dtype)));
  }
  for (const auto* parts : {&input_parts, &output_parts}) {
    if (*parts && (*parts)->size() != world) {
      throw Unsupported("a list of sizes has " + std::to_string((*parts)->size()) +
                        " entries; one per rank is needed (" + std::to_string(world) + ")");
    }
  }
  const bool splits = kind == Collective::reduce_scatter || kind == Collective::scatter ||
                      kind == Collective::all_to_all;
  const bool joins = kind == Collective::all_gather || kind == Collective::gather ||
                     kind == Collective::all_to_all;
  if (input_parts || output_parts) {
    request.input_parts = input_parts ? *input_parts : *output_parts;
    request.output_parts = output_parts ? *output_parts : *input_parts;
    const Parts& ins = request.input_parts;
    const Parts& outs = request.output_parts;
    if (in) {
      expect(in->elements, splits ? sum_of(ins) : ins[rank], "the input", "the sum of its parts");
    }
    if (out) {
      expect(out->elements, joins ? sum_of(outs) : outs[rank], "the output",
             "the sum of its parts");
    }
    if (kind != Collective::all_to_all) {
      request.count = *std::max_element(ins.begin(), ins.end());
      request.layout ^= hash_of(ins);
    }
  } else {
    const size_t from_input = in ? (splits ? in->elements / world : in->elements) : 0;
    const size_t from_output = out ? (joins ? out->elements / world : out->elements) : 0;
    request.count = in ? from_input : from_output;
    if (in && splits) {
      expect(in->elements, request.count * world, "the input",
             "the same number for every rank (or give the sizes)");
    }
    if (out) {
      expect(out->elements, joins ? request.count * world : request.count, "the output",
             joins ? "the parts of all ranks" : "one rank's part of the input");
    }
  }
  if (in && out) {
    check_overlap(kind, *in, *out, rank, request);
  }
  return perform(comm, std::move(request), call, {std::move(output), std::move(input)});
}

std::shared_ptr<PyCommunicator> start(const std::string& job, int rank, int world, double timeout,
                                      bool threads, const std::string& algorithm,
                                      bool deterministic) {
  Options options;
  options.job = job;
  options.rank = rank;
  options.world = world;
  options.timeout_s = timeout;
  options.threads = threads;
  options.algorithm = algorithm;
  options.deterministic = deterministic;
  options.interrupt = check_signals;
  auto comm = std::make_shared<PyCommunicator>();
  const py::gil_scoped_release no_gil;
  comm->core = Communicator::start(options);
  return comm;
}

MessageOperation::Direction direction_of(bool sends) {
  return sends ? MessageOperation::Direction::send : MessageOperation::Direction::receive;
}

py::object message(const std::shared_ptr<PyCommunicator>& comm, bool sends, py::object object,
                   int peer, uint64_t tag, double timeout, bool asynchronous) {
  const Buffer buffer = buffer_of(object, "tensor", sends ? Access::read : Access::write);
  Communicator& core = *comm->core;
  if (peer < 0 || peer >= core.world() || peer == core.rank()) {
    throw Unsupported("rank " + std::to_string(core.rank()) + " can't exchange a message with " +
                      std::to_string(peer) + ": choose another rank of 0.." +
                      std::to_string(core.world() - 1));
  }
  const size_t bytes = buffer.elements * size_of(buffer.dtype);
  if (asynchronous) {
    comm->let_go_of_completed();
    Work operation;
    {
      const py::gil_scoped_release no_gil;
      operation = core.submit_message(direction_of(sends), peer, tag, buffer.dtype, buffer.data,
                                      bytes, timeout);
    }
    return py::cast(std::make_shared<PyWork>(comm, std::move(operation),
                                             std::vector<py::object>{std::move(object)}));
  }
  const py::gil_scoped_release no_gil;
  core.run_message(direction_of(sends), peer, tag, buffer.dtype, buffer.data, bytes, timeout,
                   check_signals);
  return py::none();
}

}  // namespace

void register_communicator(py::module_& m) {
  using Comm = std::shared_ptr<PyCommunicator>;
  py::class_<PyCommunicator, Comm>(m, "Communicator")
      .def_property_readonly("rank", [](const PyCommunicator& c) { return c.core->rank(); })
      .def_property_readonly("world_size", [](const PyCommunicator& c) { return c.core->world(); })
      .def_property_readonly("closed", [](const PyCommunicator& c) { return c.core->closed(); })
      .def_property_readonly("failed",
                             [](const PyCommunicator& c) { return c.core->group().failed(); })
      .def("all_reduce_now", all_reduce_now)
      .def("whole",
           [](const Comm& comm, const std::string& kind, py::object output, py::object input,
              const std::string& op, double factor, int root, const py::object& algorithm,
              int priority, double timeout, uint64_t layout, bool asynchronous) {
             return whole(comm, parse_collective(kind), std::move(output), std::move(input), op,
                          factor, root,
                          call_of(*comm, algorithm, priority, timeout, layout, asynchronous));
           })
      .def("parted",
           [](const Comm& comm, const std::string& kind, py::object output, py::object input,
              const std::string& op, double factor, int root,
              const std::optional<Parts>& input_parts, const std::optional<Parts>& output_parts,
              const py::object& algorithm, int priority, double timeout, uint64_t layout,
              bool asynchronous) {
             return parted(comm, parse_collective(kind), std::move(output), std::move(input), op,
                           factor, root, input_parts, output_parts,
                           call_of(*comm, algorithm, priority, timeout, layout, asynchronous));
           })
      .def("barrier",
           [](const Comm& comm, double timeout, bool asynchronous) {
             Request request;
             return perform(comm, std::move(request),
                            call_of(*comm, py::none(), 0, timeout, 0, asynchronous), {});
           })
      .def("message", message)
      .def("empty",
           [](PyCommunicator& comm, const std::vector<int64_t>& shape, py::object dtype) {
             comm.core->check_usable();
             auto memory = comm.core->allocate(bytes_of_tensor(shape, dtype));
             return tensor_over(std::move(memory), shape, dtype);
           })
      .def("split",
           [](const Comm& comm, int color, int key) -> Comm {
             auto part = std::make_shared<PyCommunicator>();
             {
               const py::gil_scoped_release no_gil;
               part->core = comm->core->split(color, key, check_signals);
             }
             return part->core ? part : nullptr;
           })
      .def("abort",
           [](PyCommunicator& comm, const std::string& reason) {
             const py::gil_scoped_release no_gil;
             comm.core->abort(reason);
           })
      .def("close",
           [](PyCommunicator& comm) {
             const py::gil_scoped_release no_gil;
             comm.core->close();
           })
      .def("stats", stats_of)
      .def("start_trace", [](PyCommunicator& comm,
                             size_t capacity) { comm.core->endpoint().trace().start(capacity); })
      .def("stop_trace", stop_trace)
      .def("latency_loop", [](PyCommunicator& comm, size_t bytes, int iterations) {
        const py::gil_scoped_release no_gil;
        return latency_loop(comm, bytes, iterations);
      });
  m.def("start", start, py::arg("job"), py::arg("rank"), py::arg("world_size"), py::arg("timeout"),
        py::arg("threads"), py::arg("algorithm"), py::arg("deterministic"));
}

}  // namespace dpcore
