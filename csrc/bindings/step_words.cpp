// Reads what a word says from Python's objects: hyperparameters, train and eval, the input. Called
// in every synchronised forward, where reading them in Python would take ten times as long.
#include "bindings/step_words.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "comm/base/fnv.h"
#include "tensors/tensor_memory.h"

namespace py = pybind11;

namespace dpcore {
namespace {

constexpr size_t kModulesPerWord = 12;
constexpr int kDepthOfInputs = 4;

bool is_text(PyObject* object, const char* text) {
  return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}

uint64_t hash_of_bytes(const void* bytes, size_t count) {
  Fnv hash;
  for (size_t at = 0; at < count; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(bytes) + at, std::min(sizeof(word), count - at));
    hash.add(word);
  }
  return hash.add(count).value();
}

uint64_t hash_of_text(PyObject* text) {
  Py_ssize_t length = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text, &length);
  return hash_of_bytes(bytes, static_cast<size_t>(length));
}

// Of numbers, texts and sequences of them. Other objects are 0: they say nothing that ranks could
// compare.
uint64_t hash_of_setting(PyObject* value) {
  if (PyFloat_Check(value)) {
    return Fnv().add(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value))).value();
  }
  if (PyLong_Check(value)) {  // True and False as well
    int overflow = 0;
    return Fnv().add(static_cast<uint64_t>(PyLong_AsLongLongAndOverflow(value, &overflow))).value();
  }
  if (PyUnicode_Check(value)) {
    return hash_of_text(value);
  }
  if (THPVariable_Check(value)) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    const bool is_number =
        tensor.numel() == 1 && tensor.is_cpu() && has_memory(tensor) && tensor.is_floating_point();
    return is_number ? Fnv().add(std::bit_cast<uint64_t>(tensor.item().toDouble())).value() : 0;
  }
  if (PyTuple_Check(value) || PyList_Check(value)) {
    const py::object sequence = py::reinterpret_steal<py::object>(PySequence_Fast(value, ""));
    Fnv hash;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i) {
      hash.add(hash_of_setting(PySequence_Fast_GET_ITEM(sequence.ptr(), i)));
    }
    return hash.value();
  }
  return 0;
}

// Of a group, whatever the order of its entries. Parameters and their names, which are lists, are
// left out: each rank may have others.
uint64_t hash_of_group(PyObject* group) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t at = 0;
  uint64_t sum = 0;
  while (PyDict_Next(group, &at, &key, &value) != 0) {
    const bool is_left_out =
        PyList_Check(value) && (is_text(key, "params") || is_text(key, "param_names"));
    if (PyUnicode_Check(key) && !is_left_out) {
      sum += Fnv().add(hash_of_text(key)).add(hash_of_setting(value)).value();
    }
  }
  return sum;
}

// `optimizers`: their lists of groups.
void say_hyperparameters(StepWords::Said& own, const py::list& optimizers) {
  Fnv hash;
  for (const py::handle groups : optimizers) {
    hash.add(1);
    if (!PyList_Check(groups.ptr())) {
      continue;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups.ptr()); ++i) {
      PyObject* group = PyList_GET_ITEM(groups.ptr(), i);
      if (!PyDict_Check(group)) {
        continue;
      }
      hash.add(hash_of_group(group));
    }
  }
  own.hyperparameters = py::len(optimizers) == 0 ? 0 : hash.value();
}

// Of some of the modules, others in the next step.
uint64_t hash_of_modes(const py::list& modules, uint64_t step) {
  static PyObject* const kTraining = PyUnicode_InternFromString("training");
  const size_t count = std::min<size_t>(modules.size(), kModulesPerWord);
  Fnv hash;
  size_t at = count == 0 ? 0 : step * count % modules.size();
  for (size_t i = 0; i < count; ++i, at = at + 1 == modules.size() ? 0 : at + 1) {
    PyObject* module = PyList_GET_ITEM(modules.ptr(), static_cast<Py_ssize_t>(at));
    PyObject* training = PyObject_GetAttr(module, kTraining);
    if (training == nullptr) {
      PyErr_Clear();
    }
    hash.add(training == Py_True ? 1 : 0);
    Py_XDECREF(training);
  }
  return hash.value();
}

// The first tensor in it, or nullptr.
PyObject* first_tensor(PyObject* input, int depth) {
  if (THPVariable_Check(input)) {
    return input;
  }
  if (depth == 0) {
    return nullptr;
  }
  if (PyTuple_Check(input) || PyList_Check(input)) {
    const Py_ssize_t count = PySequence_Size(input);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item =
          PyTuple_Check(input) ? PyTuple_GET_ITEM(input, i) : PyList_GET_ITEM(input, i);
      if (PyObject* found = first_tensor(item, depth - 1)) {
        return found;
      }
    }
  } else if (PyDict_Check(input)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t at = 0;
    while (PyDict_Next(input, &at, &key, &value) != 0) {
      if (PyObject* found = first_tensor(value, depth - 1)) {
        return found;
      }
    }
  }
  return nullptr;
}

// The length of the batch, and the bytes in its middle.
void say_input(StepWords::Said& own, const py::tuple& inputs, const py::dict& named) {
  own.samples = 0;
  own.data = 0;
  PyObject* found = first_tensor(inputs.ptr(), kDepthOfInputs);
  found = found != nullptr ? found : first_tensor(named.ptr(), kDepthOfInputs);
  if (found == nullptr) {
    return;
  }
  const at::Tensor& tensor = THPVariable_Unpack(found);
  if (tensor.layout() != at::kStrided || tensor.dim() == 0) {
    return;
  }
  own.samples = static_cast<uint64_t>(tensor.size(0));
  if (tensor.is_cpu() && has_memory(tensor) && tensor.is_contiguous() && tensor.nbytes() > 0) {
    constexpr size_t kSample = 64;
    const size_t bytes = std::min(kSample, tensor.nbytes());
    const size_t begin = (tensor.nbytes() - bytes) / 2;
    own.data = hash_of_bytes(static_cast<const char*>(tensor.const_data_ptr()) + begin, bytes) | 1;
  }
}

}  // namespace

py::list heard(const std::vector<Word>& words) {
  py::list all;
  for (const Word& word : words) {
    const auto said = std::bit_cast<StepWords::Said>(word);
    all.append(py::make_tuple(said.step, said.optimizer_steps, said.local_forwards,
                              said.unaveraged_steps, said.flags, said.hyperparameters, said.modes,
                              said.digest, said.samples, said.loads, said.data));
  }
  return all;
}

void register_step_words(py::class_<Reducer, std::shared_ptr<Reducer>>& reducer) {
  reducer
      .def("name_of", [](const Reducer& self,
                         size_t gradient) { return self.gradient_list().at(gradient).name; })
      .def("say",
           [](Reducer& self, const py::list& optimizers, const py::list& modules, uint32_t loads,
              const py::tuple& inputs, const py::dict& named) {
             StepWords::Said& own = self.words().own;
             say_hyperparameters(own, optimizers);
             own.modes = hash_of_modes(modules, self.completed_iterations());
             own.loads = loads;
             say_input(own, inputs, named);
           })
      .def("optimizer_stepped", &Reducer::optimizer_stepped)
      .def_property_readonly("has_local_gradients",
                             [](Reducer& self) { return self.words().has_local_gradients(); })
      .def("local_gradients", [](Reducer& self) { return self.words().local_gradients(); })
      .def_property_readonly(
          "has_edited_local_gradients",
          [](Reducer& self) { return self.words().has_edited_local_gradients(); })
      .def("rebase_optimizer_steps",
           [](Reducer& self, uint32_t steps) { self.words().own.optimizer_steps = steps; })
      .def("say_knocks", [](Reducer& self, uint8_t knocks) { self.words().own.knocks = knocks; })
      .def_property_readonly("knocks", [](Reducer& self) { return self.words().knocks(); })
      .def("add_unaveraged_step", [](Reducer& self) { return ++self.words().own.unaveraged_steps; })
      .def_property_readonly("local_forwards",
                             [](Reducer& self) { return self.words().own.local_forwards; })
      .def_property_readonly("has_changed_since_digest",
                             [](Reducer& self) { return self.words().has_changed_since_digest(); })
      .def("set_known_findings",
           [](Reducer& self, uint32_t findings) { self.words().set_known(findings); })
      .def("digest", [](const Reducer& self, uint64_t label, bool on_device) {
        return on_device ? digest_on_device(self.gradient_list(), label)
                         : digest_of_lines(self.gradient_list(), label);
      });
}

}  // namespace dpcore
