// dpcore._C.Reducer and plan_buckets. dpcore.DataParallel is the face of it; here tensors are
// unpacked and errors put on their way through autograd.
#include "reducer/reducer.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <span>
#include <string>

#include "bindings/buckets/stream_bucket_communicator.h"
#include "bindings/buckets/torch_bucket_communicator.h"
#include "bindings/callbacks/callbacks.h"
#include "bindings/step_words.h"
#include "comm/base/fnv.h"
#include "comm/reduce/not_finite.h"
#include "reducer/bucket/bucket_communicator_native.h"
#include "reducer/plan/bucket_plan.h"
#include "tensors/tensor_memory.h"

namespace py = pybind11;

namespace dpcore {
namespace {

py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

std::vector<at::Tensor> tensors_of(const py::iterable& objects) {
  std::vector<at::Tensor> tensors;
  for (const py::handle object : objects) {
    tensors.push_back(THPVariable_Unpack(object.ptr()));
  }
  return tensors;
}

// Autograd passes on exceptions of this type with their Python class; others become RuntimeError.
void raise_through_autograd() {
  const py::gil_scoped_acquire gil;
  try {
    throw;
  } catch (py::error_already_set& problem) {
    problem.restore();
  } catch (const python_error&) {
    throw;  // a hook within a hook: on its way already
  } catch (const std::exception&) {
    if (!set_python_error(std::current_exception())) {
      torch::translate_exception_to_python(std::current_exception());
    }
  }
  python_error carried;
  carried.persist();
  throw carried;
}

std::shared_ptr<BucketCommunicator> bucket_communicator_of(const py::object& group, bool ordered,
                                                           bool deterministic,
                                                           std::span<const at::Tensor> parameters) {
  if (py::isinstance<PyCommunicator>(group)) {
    return native_bucket_communicator(group.cast<PyCommunicator&>().core, ordered, deterministic,
                                      check_signals);
  }
  if (py::isinstance<PyStreamCommunicator>(group)) {
    const auto& comm = group.cast<const PyStreamCommunicator&>();
    return std::make_shared<StreamBucketCommunicator>(comm.core, comm.device_name, ordered,
                                                      deterministic);
  }
  const at::Device device = parameters.empty() ? at::kCPU : parameters.front().device();
  if (py::isinstance<c10d::ProcessGroup>(group)) {
    return std::make_shared<TorchBucketCommunicator>(
        group.cast<c10::intrusive_ptr<c10d::ProcessGroup>>(), device);
  }
  return python_bucket_communicator(group, device);
}

// A method as a callback of the reducer. Weakly held: the method's object owns the reducer.
auto weak_method(const py::function& method) {
  return [object = py::weakref(method.attr("__self__")),
          name = py::str(method.attr("__name__"))](const auto&... arguments) {
    const py::gil_scoped_acquire gil;
    object().attr(name)(arguments...);
  };
}

std::shared_ptr<Reducer> make_reducer(
    const py::list& parameters, const std::vector<std::string>& names,
    const std::vector<bool>& sparse, std::vector<std::vector<size_t>> modules,
    const py::object& group, const py::object& schedule, const std::vector<uint64_t>& caps,
    bool find_unused, bool grad_is_part, bool skip_unused, bool static_graph, bool born,
    bool finds_mistakes, bool ordered, bool deterministic, std::string profiled_as,
    const py::function& reduce_sparse, const py::function& update, const py::function& differ,
    uint64_t tag, uint64_t traced_as, std::string model, std::string advice) {
  std::vector<Gradient> gradients(names.size());
  const std::vector<at::Tensor> tensors = tensors_of(parameters);
  for (size_t i = 0; i < names.size(); ++i) {
    gradients[i].parameter = tensors[i];
    gradients[i].name = names[i];
    gradients[i].is_sparse = sparse[i];
  }
  return std::make_shared<Reducer>(
      std::move(gradients), std::move(modules),
      Reducer::Settings{caps, find_unused, grad_is_part, skip_unused, static_graph, born,
                        finds_mistakes, std::move(profiled_as), tag, traced_as, std::move(model),
                        std::move(advice)},
      bucket_communicator_of(group, ordered, deterministic, tensors), launch_schedule_of(schedule),
      Reducer::Callbacks{
          raise_through_autograd, weak_method(reduce_sparse), weak_method(update),
          [call = weak_method(differ)](uint32_t found, const std::vector<Word>& words) {
            const py::gil_scoped_acquire gil;
            call(found, heard(words));
          }});
}

py::dict declined_of(const Reducer& reducer) {
  py::dict found;
  const auto& declined = reducer.declined_gradients();
  for (size_t i = 0; i < declined.size(); ++i) {
    if (declined[i] != nullptr) {
      found[py::str(reducer.gradient_list()[i].name)] = declined[i];
    }
  }
  return found;
}

// In the order of `Found` (dpcore/ddp/mistakes/not_finite.py).
py::object not_finite_of(const Reducer& reducer) {
  const NotFiniteGradient* found = reducer.not_finite();
  if (found == nullptr) {
    return py::none();
  }
  std::vector<int> ranks;
  for (int r = 0; r < 64; ++r) {
    if ((found->ranks >> r & 1) != 0) {
      ranks.push_back(r);
    }
  }
  return py::make_tuple(found->gradient, reducer.gradient_list()[found->gradient].name, found->rank,
                        ranks, found->element, found->counts.nans, found->counts.infs,
                        found->elements, found->step, found->narrowed_to);
}

py::list report_of(const Reducer& reducer) {
  py::list buckets;
  const StepRecord& record = reducer.record();
  const auto after = [&](int64_t ns) -> std::optional<double> {
    return reducer.completed_iterations() == 0 || ns == 0
               ? std::nullopt
               : std::optional(static_cast<double>(ns - record.first_gradient_ns) * 1e-6);
  };
  for (size_t b = 0; b < record.buckets.size(); ++b) {
    const Bucket& bucket = reducer.bucket_list()[b];
    py::list names;
    for (const size_t i : bucket.gradients) {
      names.append(reducer.gradient_list()[i].name);
    }
    py::dict entry;
    entry["dtype"] = py::str(c10::toString(bucket.flat.scalar_type()));
    entry["parameters"] = names;
    entry["bytes"] = bucket.bytes;
    entry["ready_ms"] = after(record.buckets[b].ready_ns);
    entry["launched_ms"] = after(record.buckets[b].launched_ns);
    entry["complete_ms"] = after(record.buckets[b].complete_ns);
    buckets.append(entry);
  }
  return buckets;
}

// The way of each gradient in the last step (BirthPlan::Way), or none.
std::optional<std::vector<std::string>> births_of(const Reducer& reducer) {
  if (reducer.births() == nullptr) {
    return std::nullopt;
  }
  static constexpr const char* kWays[] = {"unknown", "born", "kept",      "small",
                                          "watched", "held", "elsewhere", "announced"};
  std::vector<std::string> ways;
  for (size_t i = 0; i < reducer.gradient_list().size(); ++i) {
    ways.emplace_back(kWays[reducer.births()->way_of(i)]);
  }
  return ways;
}

std::vector<std::string> phases_of(const Reducer& reducer) {
  std::vector<std::string> names;
  const Phases phases = reducer.schedule().phases();
  for (size_t at = 0; at < phases.size(); ++at) {
    names.push_back(name_of(phases[at]));
  }
  return names;
}

template <LaunchSchedule::Event event>
bool listens_to(const Reducer& reducer) {
  return (reducer.schedule().listens() & event) != 0;
}

// The bucket's flat tensor, the numbers of its gradients, and their parts of it.
py::tuple bucket_of(const Reducer& reducer, size_t number) {
  const Bucket& bucket = reducer.bucket_list().at(number);
  py::list parts;
  for (const size_t i : bucket.gradients) {
    parts.append(wrapped(tensor_like(reducer.gradient_list()[i].part)));
  }
  return py::make_tuple(wrapped(bucket.flat), bucket.gradients, parts);
}

py::dict times_of(Reducer& reducer) {
  const StepSamples& times = reducer.samples();
  py::dict out;
  const auto add = [&out, &times](const char* name, int64_t last, int64_t sum) {
    out[name] = last;
    out[(std::string("avg_") + name).c_str()] =
        times.count > 0 ? sum / static_cast<int64_t>(times.count) : 0;
  };
  add("forward_compute_time", times.last.forward, times.sum.forward);
  add("backward_compute_time", times.last.backward, times.sum.backward);
  add("backward_comm_time", times.last.communication, times.sum.communication);
  add("backward_compute_comm_overlap_time", times.last.overlap, times.sum.overlap);
  out["forward_compute_time_start"] = times.forward_begin;
  out["backward_compute_time_start"] = times.backward_begin;
  out["backward_compute_time_end"] = times.backward_end;
  out["backward_comm_time_start"] = times.communication_begin;
  out["backward_comm_time_end"] = times.communication_end;
  out["iteration"] = times.step;
  out["num_buckets_reduced"] = times.buckets_reduced;
  return out;
}

// See step_figures.h.
py::tuple sums_of(Reducer& reducer) {
  const StepSums& sums = reducer.sums();
  return py::make_tuple(sums.backwards, sums.compute_ns, reducer.record().waited_ns,
                        sums.communication_ns, sums.bytes);
}

// The place of the first tensor that has a NaN, of dense ones on the CPU.
std::optional<size_t> first_with_nan(const py::list& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(tensors[i].ptr());
    const DType dtype = dtype_of(tensor.scalar_type(), "buffer");
    if (has_nan(dtype, tensor.const_data_ptr(), static_cast<size_t>(tensor.numel()))) {
      return i;
    }
  }
  return std::nullopt;
}

// Of all tensors in the list, which may hold None. Python takes a hundred times as long to look.
uint64_t hash_of_sizes(const py::list& tensors) {
  Fnv hash;
  for (const py::handle object : tensors) {
    if (THPVariable_Check(object.ptr())) {
      for (const int64_t extent : THPVariable_Unpack(object.ptr()).sizes()) {
        hash.add(static_cast<uint64_t>(extent));
      }
    }
    hash.add(~uint64_t{0});  // the end of one
  }
  return hash.value();
}

void use_hook(Reducer& reducer, const py::object& runner) {
  std::unique_ptr<BucketHook> hook = runner.is_none() ? nullptr : python_hook(runner);
  const py::gil_scoped_release no_gil;  // it may wait
  reducer.use_hook(std::move(hook));
}

// `guard(in_flight) -> bool`, see dpcore/ddp/wrapper/in_flight.py. It is called, and dropped, with
// the GIL.
void defer_by(Reducer& reducer, py::object guard) {
  const std::shared_ptr<py::object> kept(new py::object(std::move(guard)), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  reducer.defer_by([kept](bool in_flight) {
    const py::gil_scoped_acquire gil;
    return (*kept)(in_flight).cast<bool>();
  });
}

void use_reduced_type(Reducer& reducer, const py::object& dtype) {
  if (!THPDtype_Check(dtype.ptr())) {
    throw py::type_error("reduce_as: expected a torch.dtype");
  }
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  const py::gil_scoped_release no_gil;
  reducer.reduce_as(type);
}

std::vector<std::vector<size_t>> plan(const std::vector<uint64_t>& sizes,
                                      const std::vector<uint32_t>& kinds,
                                      const std::vector<size_t>& order,
                                      const std::vector<uint64_t>& caps) {
  if (caps.empty() || sizes.size() != kinds.size()) {
    throw py::value_error("plan_buckets: one kind per size and at least one cap are needed");
  }
  std::vector<PlannedGradient> gradients(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    gradients[i] = {sizes[i], kinds[i]};
  }
  for (const size_t i : order) {
    if (i >= sizes.size()) {
      throw py::index_error("plan_buckets: the order names gradient " + std::to_string(i));
    }
  }
  return plan_buckets(gradients, order, caps);
}

}  // namespace

void register_reducer(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;  // of what may wait
  m.def(
      "check_memory",
      [](py::handle tensor, const std::string& role) {
        check_memory(THPVariable_Unpack(tensor.ptr()), role.c_str());
      },
      py::arg("tensor"), py::arg("role"));
  m.def("plan_buckets", plan, py::arg("sizes"), py::arg("kinds"), py::arg("order"),
        py::arg("caps"));
  m.def("hash_of_sizes", hash_of_sizes);
  m.def("first_with_nan", first_with_nan);
  py::class_<Reducer, std::shared_ptr<Reducer>> reducer(m, "Reducer");
  reducer
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("names"), py::arg("sparse"),
           py::arg("modules"), py::arg("group"), py::arg("schedule"), py::arg("caps"),
           py::arg("find_unused"), py::arg("grad_is_part"), py::arg("skip_unused"),
           py::arg("static_graph"), py::arg("born"), py::arg("finds_mistakes"), py::arg("ordered"),
           py::arg("deterministic"), py::arg("profiled_as"), py::arg("reduce_sparse"),
           py::arg("update"), py::arg("differ"), py::arg("tag"), py::arg("traced_as"),
           py::arg("model"), py::arg("advice"))
      .def("begin_forward", &Reducer::begin_forward, NoGil())
      .def("end_forward",
           [](Reducer& reducer, bool synchronised, const py::iterable& outputs) {
             const std::vector<at::Tensor> tensors = tensors_of(outputs);
             const py::gil_scoped_release no_gil;  // it may wait
             reducer.end_forward(synchronised, tensors);
           })
      .def("forward_of_module_begins", &Reducer::forward_of_module_begins, NoGil())
      .def("optimizer_steps", &Reducer::optimizer_steps, NoGil())
      .def("wait_for_gradients", &Reducer::wait_for_gradients, NoGil())
      .def("update_steps", &Reducer::update_steps, NoGil())
      .def("flush", &Reducer::flush, NoGil())
      .def("finish_phases", &Reducer::finish_phases, NoGil())
      .def("set_modules", &Reducer::set_modules)
      .def("parameters_of",
           [](Reducer& reducer, size_t bucket) { return wrapped(reducer.parameters_of(bucket)); })
      .def("flat_of", [](const Reducer& reducer,
                         size_t bucket) { return wrapped(reducer.bucket_list().at(bucket).flat); })
      .def("part_of",
           [](const Reducer& reducer, size_t bucket) { return wrapped(reducer.part_of(bucket)); })
      .def_property_readonly("whole_buckets", &Reducer::whole_buckets)
      .def("is_current", &Reducer::is_current)
      .def_property_readonly("buckets",
                             [](const Reducer& reducer) { return reducer.bucket_list().size(); })
      .def_property_readonly("has_failed", &Reducer::has_failed)
      .def_property_readonly("is_in_flight", &Reducer::is_in_flight)
      .def_property_readonly("phases", phases_of)
      .def("is_averaged", &Reducer::is_averaged)
      .def("share_parameters_with", &Reducer::share_parameters_with, NoGil())
      .def("defer_by", defer_by)
      .def("check_complete", &Reducer::check_complete, NoGil())
      .def("outermost_backward_begins", &Reducer::outermost_backward_begins)
      .def("shadow_backward", &Reducer::shadow_backward, NoGil())
      .def("set_scale", &Reducer::set_scale)
      .def("use_hook", use_hook)
      .def("reduce_as", use_reduced_type)
      .def("set_static_graph", &Reducer::set_static_graph)
      .def("stop_listening", &Reducer::stop_listening)
      .def("measure_norms",
           [](Reducer& reducer, double variance) { reducer.norms().measure_next(variance); })
      .def("take_norms",
           [](Reducer& reducer) {
             py::list steps;
             for (const GradientNorms::Step& step : reducer.norms().take()) {
               const at::Tensor here = step.norms.cpu();
               const auto* norms = here.const_data_ptr<double>();
               steps.append(py::make_tuple(step.number, norms[0], norms[1], norms[2]));
             }
             return steps;
           })
      .def("sample_every",
           [](Reducer& reducer, uint64_t steps) { reducer.samples().every = steps; })
      .def("bucket", bucket_of)
      .def("times", times_of)
      .def("watch", [](Reducer& reducer, bool on) { reducer.sums().is_watched = on; })
      .def("sums", sums_of)
      .def_property_readonly("is_incomplete", &Reducer::is_incomplete)
      .def("cut_instead_of_raising", &Reducer::cut_instead_of_raising)
      .def_property_readonly("is_cut", &Reducer::is_cut)
      .def_property_readonly("has_ended_incomplete", &Reducer::has_ended_incomplete)
      .def_property_readonly("finds_not_finite", &Reducer::finds_not_finite)
      .def_property_readonly("not_finite", not_finite_of)
      .def_property_readonly("is_graph_static", &Reducer::is_graph_static)
      .def_property_readonly("used_counts", &Reducer::used_counts)
      .def_property_readonly("completed", &Reducer::completed_iterations)
      .def_property_readonly("early_gradients", &Reducer::early_gradients)
      .def_property_readonly("compiled_gradients", &Reducer::compiled_gradients)
      .def_property_readonly("declined_gradients", declined_of)
      .def("look_again", &Reducer::look_again)
      .def("rebuild", &Reducer::rebuild, py::arg("order"), py::arg("caps"), NoGil())
      .def("use_schedule",
           [](Reducer& reducer, const py::object& schedule) {
             std::shared_ptr<LaunchSchedule> made = launch_schedule_of(schedule);
             const py::gil_scoped_release no_gil;  // it may wait
             reducer.use_schedule(std::move(made));
           })
      .def_property_readonly("backward_ns",
                             [](const Reducer& reducer) {
                               return reducer.record().over_ns - reducer.record().first_gradient_ns;
                             })
      .def_property_readonly("wants_rebuild", &Reducer::wants_rebuild)
      .def_property_readonly("has_rebuilt", &Reducer::has_rebuilt)
      .def_property_readonly("arrival_order",
                             [](const Reducer& reducer) { return reducer.record().arrival; })
      .def_property_readonly("arrival_ns",
                             [](const Reducer& reducer) { return reducer.record().arrival_ns; })
      .def_property_readonly("schedule",
                             [](const Reducer& reducer) { return reducer.schedule().name(); })
      .def_property_readonly("is_exact",
                             [](const Reducer& reducer) { return reducer.schedule().is_exact(); })
      .def_property_readonly("wants_forward", listens_to<LaunchSchedule::forward_begin>)
      .def_property_readonly("wants_optimizer", listens_to<LaunchSchedule::optimizer_step>)
      .def_property_readonly("is_recorded", &Reducer::is_recorded)
      .def("forward_begins", &Reducer::forward_begins)
      .def("forward_ends", &Reducer::forward_ends)
      .def("backward_begins", &Reducer::backward_begins)
      .def("copies",
           [](const Reducer& reducer) {
             const GradientCopier::Counts& copies = reducer.copies();
             py::dict out;
             out["launches"] = copies.launches;
             out["together"] = copies.together;
             out["alone"] = copies.alone;
             out["born"] = copies.born;
             out["moved"] = copies.moved;
             return out;
           })
      .def("births", births_of)
      .def("report", report_of);
  register_step_words(reducer);
}

}  // namespace dpcore
