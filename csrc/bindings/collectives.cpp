// The collectives of dpcore._C.Communicator on Python objects: buffers and sizes are checked here
// and the GIL is let go. The package's Communicator adds the signatures and the documentation.
//
// A small operation between processes is first looked at with the GIL held, for a few
// microseconds at most: it usually is complete by then, and letting the GIL go and taking it
// again would cost a good part of what the operation takes.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <vector>

#include "bindings/call_arguments.h"
#include "bindings/py_stream.h"
#include "comm/base/error.h"
#include "comm/collective/request.h"
#include "comm/schedule/schedule.h"

namespace py = pybind11;

namespace dpcore {

namespace {

constexpr size_t kShortBytes = 16384;
constexpr int kLooksWithGil = 32;

using Option = KeywordArguments;

// What all collectives share.
template <class Comm>
Call call_of(Comm& comm, const KeywordArguments& options) {
  Call call;
  options.read(Option::priority, call.priority, CallArguments::integer_of);
  options.read(Option::timeout, call.timeout, CallArguments::timeout_of);
  options.read(Option::layout, call.layout, CallArguments::natural_of);
  options.read(Option::async_op, call.asynchronous, CallArguments::flag_of);
  const py::handle algorithm = options[Option::algorithm];
  if (algorithm) {
    call.algorithm = comm.algorithms.of(algorithm, comm.core->rank(), comm.core->world());
  }
  return call;
}

// What some have: an operator, its factor, a root.
void read_reduction(Request& request, const KeywordArguments& options, int world) {
  options.read(Option::op, request.op, [](py::handle value, const char* name) {
    return parse_reduce_op(CallArguments::text_of(value, name));
  });
  options.read(Option::factor, request.prescale, CallArguments::real_of);
  options.read(Option::root, request.root, CallArguments::integer_of);
  if (request.root < 0 || request.root >= world) {
    throw py::value_error("root " + std::to_string(request.root) + " is not a rank: 0.." +
                          std::to_string(world - 1));
  }
}

// Of a buffer that the root alone has.
void check_presence(py::handle buffer, const char* role, int rank, int root) {
  if (buffer.is_none() == (rank == root)) {
    throw py::value_error("rank " + std::to_string(rank) + ": " + role +
                          (rank == root ? " must be given" : " must be None") + " here (root is " +
                          std::to_string(root) + ")");
  }
}

std::optional<Parts> sizes_in(py::handle value, const char* name) {
  return value ? CallArguments::sizes_of(value, name) : std::nullopt;
}

void run_and_wait(Communicator& core, Request&& request, const std::string& algorithm) {
  Work pending;
  const bool is_short = request.count * size_of(request.dtype) <= kShortBytes;
  if (is_short && !core.endpoint().shares_process()) {
    pending = core.begin(std::move(request), algorithm, kLooksWithGil);
    if (!pending) {
      return;
    }
  }
  const py::gil_scoped_release no_gil;
  if (pending) {
    core.wait(*pending, 0, check_signals);
  } else {
    core.run(std::move(request), algorithm, check_signals);
  }
}

template <class Submit>
py::object as_work(py::handle self, std::vector<HeldBuffer> buffers, Submit submit) {
  Work operation;
  {
    const py::gil_scoped_release no_gil;
    operation = submit();
  }
  return py::cast(std::make_shared<PyWork>(self.cast<std::shared_ptr<PyCommunicator>>(),
                                           std::move(operation), std::move(buffers)));
}

py::object perform(PyCommunicator& comm, py::handle self, Request&& request, const Call& call,
                   Buffer&& output, Buffer&& input) {
  comm.let_go_of_completed();
  request.priority = call.priority;
  request.timeout_s = call.timeout;
  request.layout ^= call.layout;
  use_algorithm(request, call.algorithm_or_own(), comm.core->world());
  if (call.asynchronous) {
    return as_work(self, held(output, input), [&] {
      return comm.core->submit(std::move(request), call.algorithm_or_own().name);
    });
  }
  run_and_wait(*comm.core, std::move(request), call.algorithm_or_own().name);
  return py::none();
}

py::object perform(PyCommunicator& comm, py::handle self, const MessageCall& call,
                   bool asynchronous, Buffer&& buffer) {
  comm.let_go_of_completed();
  if (asynchronous) {
    return as_work(self, held(buffer), [&] { return comm.core->submit_message(call); });
  }
  {
    const py::gil_scoped_release no_gil;
    comm.core->run_message(call, check_signals);
  }
  return py::none();
}

void expect(size_t have, size_t want, const char* role, const char* why) {
  if (have != want) {
    throw Unsupported(std::string(role) + " has " + std::to_string(have) + " elements, " +
                      std::to_string(want) + " are needed: " + why);
  }
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
  if (!joins(kind)) {
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

Elements elements_of(Collective kind) {
  return reduces(kind) ? Elements::reduced : Elements::moved;
}

// Of one buffer of one shape everywhere, in place.
template <class Comm>
py::object whole(Comm& comm, py::handle self, Collective kind, CallArguments& arguments,
                 const KeywordArguments& options) {
  Buffer buffer = comm.buffer(arguments.object(), "tensor", Access::write, elements_of(kind));
  Request request;
  request.collective = kind;
  request.dtype = buffer.dtype;
  request.input = request.output = buffer.data;
  request.count = buffer.elements;
  read_reduction(request, options, comm.core->world());
  return perform(comm, self, std::move(request), call_of(comm, options), std::move(buffer), {});
}

// Of a part per rank. On ranks without an input or output it is None.
template <class Comm>
py::object parted(Comm& comm, py::handle self, Collective kind, CallArguments& arguments,
                  const KeywordArguments& options) {
  const auto world = static_cast<size_t>(comm.core->world());
  const auto rank = static_cast<size_t>(comm.core->rank());
  Request request;
  request.collective = kind;
  const py::handle output = arguments.object();
  const py::handle input = arguments.object();
  read_reduction(request, options, comm.core->world());
  if (goes_to_root(kind)) {
    check_presence(output, "output", comm.core->rank(), request.root);
  } else if (comes_from_root(kind)) {
    check_presence(input, "input", comm.core->rank(), request.root);
  }
  const auto input_parts = sizes_in(options[Option::input_sizes], "input sizes");
  const auto output_parts = sizes_in(options[Option::output_sizes], "output sizes");
  std::optional<Buffer> in;
  std::optional<Buffer> out;
  if (!input.is_none() || !comes_from_root(kind)) {
    in = comm.buffer(input, "input", Access::read, elements_of(kind));
    request.input = in->data;
    request.dtype = in->dtype;
  }
  if (!output.is_none() || !goes_to_root(kind)) {
    out = comm.buffer(output, "output", Access::write, elements_of(kind));
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
  const bool splits = dpcore::splits(kind);
  const bool joins = dpcore::joins(kind);
  if (input_parts || output_parts) {
    const Parts& ins = input_parts ? *input_parts : *output_parts;
    const Parts& outs = output_parts ? *output_parts : *input_parts;
    if (in) {
      expect(in->elements, splits ? sum_of(ins) : ins[rank], "the input", "the sum of its parts");
    }
    if (out) {
      expect(out->elements, joins ? sum_of(outs) : outs[rank], "the output",
             "the sum of its parts");
    }
    if (kind == Collective::all_to_all) {
      set_exchanged_parts(request, ins, outs);
    } else {
      set_parts(request, ins);
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
  return perform(comm, self, std::move(request), call_of(comm, options),
                 out ? std::move(*out) : Buffer{}, in ? std::move(*in) : Buffer{});
}

template <class Comm, Collective kind>
py::object collective(Comm& comm, py::handle self, CallArguments& arguments,
                      const KeywordArguments& options) {
  if constexpr (kind == Collective::barrier) {
    return perform(comm, self, Request{}, call_of(comm, options), {}, {});
  } else if constexpr (is_on_whole(kind)) {
    return whole(comm, self, kind, arguments, options);
  } else {
    return parted(comm, self, kind, arguments, options);
  }
}

template <class Comm, bool sends>
py::object message(Comm& comm, py::handle self, CallArguments& arguments,
                   const KeywordArguments& options) {
  MessageCall call;
  call.sends = sends;
  const py::handle object = arguments.object();
  const py::handle whom = arguments.object();
  const bool from_any = !sends && whom.is_none();
  call.peer = from_any ? MessageOperation::kAnyRank
                       : CallArguments::integer_of(whom, sends ? "dst" : "src");
  bool asynchronous = false;
  options.read(Option::tag, call.tag, CallArguments::natural_of);
  options.read(Option::timeout, call.timeout_s, CallArguments::timeout_of);
  options.read(Option::async_op, asynchronous, CallArguments::flag_of);
  Buffer buffer =
      comm.buffer(object, "tensor", sends ? Access::read : Access::write, Elements::moved);
  call.dtype = buffer.dtype;
  call.data = buffer.data;
  call.bytes = buffer.elements * size_of(buffer.dtype);
  if (!from_any) {
    check_peer(call.peer, comm.core->rank(), comm.core->world());
  }
  return perform(comm, self, call, asynchronous, std::move(buffer));
}

// A method for each collective, by its name, and two for messages.
template <class Comm, int... kinds>
void define_methods(py::handle type, std::integer_sequence<int, kinds...>) {
  (define_quick_method<Comm, collective<Comm, Collective{kinds}>>(
       type, name_of(Collective{kinds}).data()),
   ...);
  define_quick_method<Comm, message<Comm, true>>(type, "send");
  define_quick_method<Comm, message<Comm, false>>(type, "recv");
}

}  // namespace

void define_collectives(py::handle type) {
  define_methods<PyCommunicator>(type, std::make_integer_sequence<int, kCollectiveCount>());
}

void define_stream_collectives(py::handle type) {
  define_methods<PyStreamCommunicator>(type, std::make_integer_sequence<int, kCollectiveCount>());
}

}  // namespace dpcore
