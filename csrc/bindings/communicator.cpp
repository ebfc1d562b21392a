// dpcore._C.Communicator: how it starts, what it shows, how it ends. What moves data is in
// collectives.cpp.
#include "comm/communicator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/common_methods.h"
#include "bindings/observe.h"
#include "bindings/py_work.h"
#include "torch_backend/python_lock.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// The owner that drops it last, perhaps with Python's lock (a reducer, say), waits without the
// lock for what is in flight: other ranks may be threads of this process.
std::shared_ptr<Communicator> ends_without_lock(std::shared_ptr<Communicator> core) {
  Communicator* raw = core.get();
  return {raw, [core = std::move(core)](Communicator*) mutable {
            const WithoutPythonLock no_lock;
            core.reset();
          }};
}

std::shared_ptr<PyCommunicator> start(const std::string& job, int rank, int world, double timeout,
                                      bool threads, std::shared_ptr<TcpOptions> tcp,
                                      std::shared_ptr<Link> link, const std::string& algorithm,
                                      bool deterministic, const CostList& costs,
                                      double meets_within) {
  Options options;
  options.job = job;
  options.rank = rank;
  options.world = world;
  options.timeout_s = timeout;
  options.meets_within_s = meets_within;
  options.threads = threads;
  options.tcp = std::move(tcp);
  options.link = std::move(link);
  options.algorithm = algorithm;
  options.deterministic = deterministic;
  options.costs = costs_of(costs);
  options.interrupt = check_signals;
  auto comm = std::make_shared<PyCommunicator>();
  const py::gil_scoped_release no_gil;
  comm->core = ends_without_lock(Communicator::start(options));
  return comm;
}

}  // namespace

void register_communicator(py::module_& m) {
  using Comm = std::shared_ptr<PyCommunicator>;
  py::class_<PyCommunicator, Comm> type(m, "Communicator");
  define_collectives(type);
  define_common_methods(type);
  type.def_property_readonly("transport",
                             [](const PyCommunicator& c) { return c.core->group().transport(); })
      .def_property_readonly("hosts",
                             [](const PyCommunicator& c) { return c.core->group().hosts(); })
      .def_property_readonly("sharers",
                             [](PyCommunicator& c) { return c.core->group().endpoint().sharers(); })
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
               auto made = comm->core->split(color, key, check_signals);
               part->core = made ? ends_without_lock(std::move(made)) : nullptr;
             }
             return part->core ? part : nullptr;
           })
      .def("shrink",
           [](const Comm& comm, double patience) {
             auto rest = std::make_shared<PyCommunicator>();
             const py::gil_scoped_release no_gil;
             rest->core = ends_without_lock(comm->core->shrink(patience, check_signals));
             return rest;
           })
      .def(
          "grow",
          [](const Comm& comm, int count, py::object invite, py::object are_gone, double patience) {
            Guests guests{count, {}, {}};
            if (!invite.is_none()) {
              guests.invite = [&](const std::string& job, const std::string& meeting,
                                  bool shares_memory) {
                const py::gil_scoped_acquire gil;
                invite(job, meeting, shares_memory);
              };
              guests.are_gone = [&] {
                const py::gil_scoped_acquire gil;
                return are_gone().cast<bool>();
              };
            }
            auto all = std::make_shared<PyCommunicator>();
            const py::gil_scoped_release no_gil;
            all->core = ends_without_lock(comm->core->grow(guests, patience, check_signals));
            return all;
          },
          py::arg("count"), py::arg("invite"), py::arg("are_gone"), py::arg("patience"))
      .def_property_readonly("timeout", [](const PyCommunicator& c) { return c.core->timeout_s(); })
      .def_property_readonly("address", [](const PyCommunicator& c) { return c.core->address(); })
      .def("let_go_of_before",
           [](const Comm& comm) {
             const py::gil_scoped_release no_gil;
             comm->core->let_go_of_before();
           })
      .def_property_readonly("survivors",
                             [](const PyCommunicator& c) { return c.core->survivors(); })
      .def_property_readonly("completed_before",
                             [](const PyCommunicator& c) { return c.core->completed_before(); })
      .def_property_readonly(
          "costs", [](const PyCommunicator& c) { return list_of(c.core->endpoint().costs()); })
      .def("explain", explanation_of, py::arg("collective"), py::arg("nbytes"))
      .def("stats", stats_of)
      .def(
          "show_placement",  // with the GIL: it waits for nothing, and the interpreter may be
                             // ending
          [](PyCommunicator& comm, const std::string& where, int64_t since_ns) {
            comm.core->show_placement(where, since_ns);
          },
          py::arg("where"), py::arg("since_ns"))
      .def("start_trace", [](PyCommunicator& comm,
                             size_t capacity) { comm.core->endpoint().trace().start(capacity); })
      .def("stop_trace", stop_trace)
      .def("latency_loop", [](PyCommunicator& comm, size_t bytes, int iterations) {
        const py::gil_scoped_release no_gil;
        return latency_loop(comm, bytes, iterations);
      });
  m.def("default_costs", [] { return list_of({}); });
  m.def("start", start, py::arg("job"), py::arg("rank"), py::arg("world_size"), py::arg("timeout"),
        py::arg("threads"), py::arg("tcp").none(true), py::arg("link").none(true),
        py::arg("algorithm"), py::arg("deterministic"), py::arg("costs"),
        py::arg("meets_within") = 0.0);
}

}  // namespace dpcore
