// dpcore._C.StreamCommunicator and its Work: communicators for devices, with the methods of
// dpcore._C.Communicator. Work is ordered after what the calling thread has given to torch so far,
// and waiting for it orders what comes after; the GIL is let go whenever a call could block.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/call_arguments.h"
#include "bindings/common_methods.h"
#include "bindings/observe.h"
#include "bindings/py_stream.h"
#include "comm/base/error.h"
#include "cuda/device_choice.h"
#include "cuda/mapped/mapped_communicator.h"
#include "cuda/nccl/nccl_communicator.h"

namespace py = pybind11;

namespace dpcore {
namespace {

using Comm = std::shared_ptr<PyStreamCommunicator>;

// On a host's device of the tests, "host", tensors are on the CPU.
Comm start_on_device_of(const PyCommunicator& control, const std::string& device_name,
                        double timeout, const std::string& algorithm, bool deterministic,
                        const std::vector<std::string>& libraries, const std::string& backend,
                        const std::string& uuid) {
  auto comm = std::make_shared<PyStreamCommunicator>();
  comm->device_name = device_name == "host" ? "cpu" : device_name;
  const py::gil_scoped_release no_gil;
  comm->core = start_on_device(
      control.core,
      {backend, device_name, uuid, {timeout, algorithm, deterministic, check_signals}, libraries});
  return comm;
}

py::object finish(PyStreamCommunicator& comm, py::handle self, StreamCommunicator::Work work,
                  bool asynchronous, std::vector<HeldBuffer> buffers) {
  if (asynchronous) {
    return py::cast(
        std::make_shared<PyStreamWork>(self.cast<Comm>(), std::move(work), std::move(buffers)));
  }
  const Device::Stream current = comm.current_stream();
  {
    const py::gil_scoped_release no_gil;
    comm.core->order(work, current);
  }
  return py::none();  // a reference is counted with the GIL
}

py::object exchange(PyStreamCommunicator& comm, py::handle self,
                    const std::vector<StreamMessage>& messages, double timeout, bool asynchronous,
                    std::vector<HeldBuffer> buffers) {
  comm.let_go_of_completed();
  StreamCommunicator::Work work;
  const Device::Stream current = comm.current_stream();
  {
    const py::gil_scoped_release no_gil;
    work = comm.core->submit(messages, timeout, current);
  }
  return finish(comm, self, std::move(work), asynchronous, std::move(buffers));
}

// (sends, tensor, peer) each; all travel at the same time.
py::object messages(const py::object& self,
                    const std::vector<std::tuple<bool, py::object, int>>& list, double timeout,
                    bool asynchronous) {
  auto& comm = self.cast<PyStreamCommunicator&>();
  std::vector<StreamMessage> wanted;
  std::vector<HeldBuffer> buffers;
  for (const auto& [sends, tensor, peer] : list) {
    Buffer buffer =
        comm.buffer(tensor, "tensor", sends ? Access::read : Access::write, Elements::moved);
    wanted.push_back({sends, peer, buffer.data, buffer.elements * size_of(buffer.dtype)});
    buffers.emplace_back(std::move(buffer));
  }
  return exchange(comm, self, wanted, timeout, asynchronous, std::move(buffers));
}

void wait_for(PyStreamWork& held, RealArgument<"timeout"> timeout) {
  check_wait(timeout);
  const Device::Stream current = held.communicator->current_stream();
  const py::gil_scoped_release no_gil;
  if (timeout > 0) {
    held.communicator->core->wait(held.operation, timeout, check_signals);
  }
  held.communicator->core->order(held.operation, current);
}

py::object failure_of_stream_work(PyStreamWork& held) {
  if (held.operation->state.load(std::memory_order_acquire) != StreamWork::failed) {
    return py::none();
  }
  return told(held.communicator->core->group().failure());
}

py::dict library_of(const std::vector<std::string>& libraries) {
  const nccl::Library& library = nccl::library(libraries);
  py::dict result;
  result["path"] = library.path;
  result["version"] = library.version;
  result["found_by"] = library.found_by;
  return result;
}

std::shared_ptr<PyCommunicator> control_of(const PyStreamCommunicator& comm) {
  auto control = std::make_shared<PyCommunicator>();
  control->core = comm.core->control();
  return control;
}

void start_trace(PyStreamCommunicator& comm, size_t capacity) {
  const py::gil_scoped_release no_gil;  // it looks at the device's clock
  comm.core->host_trace().start(capacity);
  comm.core->trace().start(capacity);
}

// What threads of the host did, and what the device did.
py::tuple stop_device_trace(PyStreamCommunicator& comm) {
  uint64_t dropped = 0;
  uint64_t dropped_of_device = 0;
  std::vector<TraceEvent> events = comm.core->host_trace().stop(&dropped);
  {
    const py::gil_scoped_release no_gil;
    const auto of_device = comm.core->stop_trace(&dropped_of_device);
    events.insert(events.end(), of_device.begin(), of_device.end());
  }
  return recording_of(events, dropped + dropped_of_device, comm.core->host_trace());
}

// See device_trace.h: None where the device is not done with it yet, and an empty tuple where it is
// lost.
py::object sums_between(PyStreamCommunicator& comm, uint64_t after, uint64_t until) {
  const auto sums = comm.core->trace().sums(after, until);
  if (!sums) {
    return py::none();
  }
  return sums->is_lost
             ? py::tuple(0)
             : py::make_tuple(sums->step, sums->compute, sums->exposed, sums->communication);
}

// (process, has descriptors, has ipc) of each rank.
std::string memory_of(const std::vector<std::tuple<uint64_t, bool, bool>>& ranks,
                      const std::string& wish) {
  std::vector<MemorySupport> supports;
  for (const auto& [process, descriptors, ipc] : ranks) {
    supports.push_back({process, descriptors, ipc});
  }
  return std::string(name_of(choose_memory(supports, wish)));
}

}  // namespace

py::object perform(PyStreamCommunicator& comm, py::handle self, Request&& request, const Call& call,
                   Buffer&& output, Buffer&& input) {
  comm.let_go_of_completed();
  // The one operation whose result is that time has passed.
  const bool waits = request.collective == Collective::barrier && !call.asynchronous;
  request.timeout_s = call.timeout;
  request.layout ^= call.layout;
  use_algorithm(request, call.algorithm_or_own(), comm.core->world());
  StreamCommunicator::Work work;
  const Device::Stream current = comm.current_stream();
  {
    const py::gil_scoped_release no_gil;
    work = comm.core->submit(std::move(request), call.algorithm_or_own().name, current);
    if (waits) {
      comm.core->wait(work, 0, check_signals);
    }
  }
  return waits ? py::none()
               : finish(comm, self, std::move(work), call.asynchronous, held(output, input));
}

py::object perform(PyStreamCommunicator& comm, py::handle self, const MessageCall& call,
                   bool asynchronous, Buffer&& buffer) {
  if (call.tag != 0) {
    throw Unsupported("messages over " + comm.core->describe() +
                      " have no tags: they meet in the order of the calls; leave tag out");
  }
  if (call.peer == MessageOperation::kAnyRank) {
    throw Unsupported("messages over " + comm.core->describe() +
                      " come from a rank that is named: pass src");
  }
  return exchange(comm, self, {{call.sends, call.peer, call.data, call.bytes}}, call.timeout_s,
                  asynchronous, held(buffer));
}

void register_stream_communicator(py::module_& m) {
  using py::arg;
  py::class_<PyStreamCommunicator, Comm> type(m, "StreamCommunicator");
  define_stream_collectives(type);
  define_common_methods(type);
  type.def_property_readonly("backend",
                             [](const PyStreamCommunicator& c) { return c.core->backend(); })
      .def_property_readonly("device",
                             [](const PyStreamCommunicator& c) { return c.core->device().name(); })
      .def_property_readonly("control", control_of)
      .def("start_trace", start_trace)
      .def("stop_trace", stop_device_trace)
      .def("watch", [](PyStreamCommunicator& c, bool on) { c.core->trace().watch(on); })
      .def("mark", [](PyStreamCommunicator& c) { return c.core->trace().mark(); })
      .def("sums", sums_between)
      .def_property_readonly("library",
                             [](const PyStreamCommunicator& c) { return c.core->describe(); })
      .def("paths", [](PyStreamCommunicator& c) { return c.core->paths(); })
      .def("messages", messages)
      .def("empty",
           [](PyStreamCommunicator& comm, const std::vector<int64_t>& shape, py::object dtype) {
             comm.core->check_usable();
             const size_t bytes = bytes_of_tensor(shape, dtype);
             std::shared_ptr<std::byte> memory;
             if (bytes > 0) {
               const py::gil_scoped_release no_gil;
               memory = comm.core->allocate_shared(bytes);
             }
             return memory ? tensor_over(std::move(memory), shape, dtype, comm.device_name)
                           : empty_tensor(shape, dtype, comm.device_name);
           })
      .def("split", [](PyStreamCommunicator& comm, int color, int key) -> Comm {
        auto part = std::make_shared<PyStreamCommunicator>();
        part->device_name = comm.device_name;
        {
          const py::gil_scoped_release no_gil;
          part->core = comm.core->split(color, key);
        }
        return part->core ? part : nullptr;
      });
  py::class_<PyStreamWork, std::shared_ptr<PyStreamWork>> works(m, "StreamWork");
  define_common_work_methods(works);
  works.def("wait", wait_for, arg("timeout") = 0.0)
      .def("is_completed",
           [](const PyStreamWork& held) {
             const StreamWork& work = *held.operation;
             return work.is_complete() || work.device->has_happened(work.event);
           })
      .def("failure", failure_of_stream_work)
      .def_property_readonly("source", [](const PyStreamWork&) { return py::none(); });
  m.def("start_on_device", start_on_device_of, arg("control"), arg("device"), arg("timeout"),
        arg("algorithm"), arg("deterministic"), arg("libraries") = std::vector<std::string>{},
        arg("backend") = "auto", arg("uuid") = "");
  m.def("nccl_library", library_of, arg("libraries"));
  m.def("_process_mark", process_mark);
  m.def("_choose_memory", memory_of, arg("ranks"), arg("wish"));
  m.def(
      "_choose_barrier",
      [](const std::vector<std::string>& uuids, const std::string& wish) {
        return choose_barrier(uuids, wish);
      },
      arg("uuids"), arg("wish"));
}

}  // namespace dpcore
