// A method of a Python class whose plain calls need no frame of the interpreter.
//
// comm.broadcast(tensor, root=0) has five options besides, and giving them to the core one by one
// takes as long as the operation on a few bytes. A plain call, which gives nothing but the first
// parameters ("tensor, root"), without a gap, and an operator by one of the core's own names, goes
// straight to the core's method instead. Every other call is left to the Python function, which has
// the signature, the documentation and the words of errors:
//
//   comm.broadcast(t, 0)    comm._native.broadcast(t, root=0)
//   comm.broadcast(t, 0, async_op=True)    function(comm, t, 0, async_op=True)
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>

namespace py = pybind11;

namespace dpcore {
namespace {

constexpr size_t kMostNames = 4;

struct QuickMethod {
  PyObject base;
  vectorcallfunc call;
  PyObject* weak;         // the list of weak references
  PyObject* dict;         // __wrapped__, __doc__ and what else functools.update_wrapper copies
  PyObject* function;     // for all other calls
  PyObject* target;       // its name, which is that of the core's method, too
  PyObject* names;        // of the leading parameters
  PyObject* operators;    // the core's words; others are the function's to translate
  Py_ssize_t positional;  // the core takes so many by position and the rest by name
  std::array<PyObject*, kMostNames + 1> options;  // for each number of names: those by name
  PyTypeObject* core;                             // of the communicator that was called last,
  PyObject* core_method;                          // and what its type has by the name `target`
};

PyObject* op_name() {
  static PyObject* const name = PyUnicode_InternFromString("op");
  return name;
}

PyObject* native_name() {
  static PyObject* const name = PyUnicode_InternFromString("_native");
  return name;
}

// The arguments in the order of `names`, and how many there are. None: not a plain call.
std::optional<Py_ssize_t> plain_arguments(const QuickMethod& method, PyObject* const* args,
                                          Py_ssize_t count, PyObject* keywords, PyObject** values) {
  const Py_ssize_t most = PyTuple_GET_SIZE(method.names);
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  if (count + named < method.positional || count + named > most) {
    return std::nullopt;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    values[i] = args[i];
  }
  for (Py_ssize_t k = 0; k < named; ++k) {
    // Names in a program's text are interned, and so are these: the same name is the same object.
    Py_ssize_t place = count;
    while (place < count + named &&
           PyTuple_GET_ITEM(method.names, place) != PyTuple_GET_ITEM(keywords, k)) {
      ++place;
    }
    if (place == count + named) {
      return std::nullopt;
    }
    values[place] = args[count + k];
  }
  for (Py_ssize_t i = method.positional; i < count + named; ++i) {
    if (PyTuple_GET_ITEM(method.names, i) == op_name() &&
        (!PyUnicode_CheckExact(values[i]) ||
         PySequence_Contains(method.operators, values[i]) != 1)) {
      return std::nullopt;
    }
  }
  return count + named;
}

// The method of this instance's type, or null where that is none of C; it is looked for where the
// type is another one than last time.
PyObject* core_method_of(QuickMethod& method, PyObject* native) {
  PyTypeObject* type = Py_TYPE(native);
  if (type == method.core) [[likely]] {
    return method.core_method;
  }
  PyObject* found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), method.target);
  if (found == nullptr || Py_TYPE(found) != &PyMethodDescr_Type) {
    PyErr_Clear();
    Py_CLEAR(found);
  }
  Py_INCREF(type);
  Py_XSETREF(method.core, type);
  Py_XSETREF(method.core_method, found);
  return found;
}

PyObject* call_quick_method(PyObject* self, PyObject* const* args, size_t flags,
                            PyObject* keywords) {
  QuickMethod& method = *reinterpret_cast<QuickMethod*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flags) - 1;  // without the instance
  std::array<PyObject*, kMostNames + 1> stack;             // instance, values
  std::optional<Py_ssize_t> given;
  if (count >= 0) {
    given = plain_arguments(method, args + 1, count, keywords, stack.data() + 1);
  }
  if (!given) {
    return PyObject_Vectorcall(method.function, args, flags, keywords);
  }
  PyObject* native = PyObject_GetAttr(args[0], native_name());
  if (native == nullptr) {
    return nullptr;
  }
  PyObject* core = core_method_of(method, native);
  if (core == nullptr) {
    Py_DECREF(native);
    return PyObject_Vectorcall(method.function, args, flags, keywords);
  }
  stack[0] = native;
  const size_t positional = 1 + static_cast<size_t>(method.positional);
  PyObject* options = method.options[static_cast<size_t>(*given - method.positional)];
  PyObject* result = PyObject_Vectorcall(core, stack.data(), positional, options);
  Py_DECREF(native);
  return result;
}

// What is taken from the class is a method, too, for code that inspects it.
PyObject* bind(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(self)
                                                    : PyMethod_New(self, instance);
}

// Pickled and copied as a function is: by its name.
PyObject* name_of_method(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(self, "__qualname__");
}

void forget(PyObject* self) {
  PyObject_ClearWeakRefs(self);
  auto& method = *reinterpret_cast<QuickMethod*>(self);
  for (PyObject* each :
       {method.dict, method.function, method.target, method.names, method.operators,
        reinterpret_cast<PyObject*>(method.core), method.core_method}) {
    Py_XDECREF(each);
  }
  for (PyObject* each : method.options) {
    Py_XDECREF(each);
  }
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(QuickMethod, call), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(QuickMethod, dict), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(QuickMethod, weak), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef methods[] = {{"__reduce__", name_of_method, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(forget)},
                                {Py_tp_members, members},
                                {Py_tp_methods, methods},
                                {Py_tp_getset, attributes},
                                {0, nullptr}};
  static PyType_Spec spec{
      "dpcore._C.QuickMethod", sizeof(QuickMethod), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return PyType_FromSpec(&spec);
}

// `names`: of the leading parameters behind self; the first `positional` have no default.
py::object quick_method(const py::function& function, const py::tuple& names, Py_ssize_t positional,
                        const py::tuple& operators) {
  static PyObject* const type = make_type();
  if (names.size() > kMostNames || positional > static_cast<Py_ssize_t>(names.size())) {
    throw py::value_error("a quick method has at most " + std::to_string(kMostNames) + " names");
  }
  auto made = py::reinterpret_steal<py::object>(
      type == nullptr ? nullptr : PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
  if (!made) {
    throw py::error_already_set();
  }
  auto& method = *reinterpret_cast<QuickMethod*>(made.ptr());
  method.call = call_quick_method;
  method.function = py::object(function).release().ptr();
  method.target = py::object(function.attr("__name__")).release().ptr();
  method.names = py::object(names).release().ptr();
  method.operators = py::object(operators).release().ptr();
  method.positional = positional;
  const auto count = static_cast<Py_ssize_t>(names.size());
  for (Py_ssize_t end = positional + 1; end <= count; ++end) {
    method.options[static_cast<size_t>(end - positional)] =
        PyTuple_GetSlice(method.names, positional, end);
  }
  py::module_::import("functools").attr("update_wrapper")(made, function);
  // Wrapped as pybind11 wraps its own methods, which torch.compile recognises.
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(made.ptr()));
}

}  // namespace

void register_quick_method(py::module_& m) {
  using py::arg;
  m.def("quick_method", &quick_method, arg("function"), arg("names"), arg("positional"),
        arg("operators"),
        "A method whose plain calls go straight to the core's method of the same name.");
}

}  // namespace dpcore
