// The arguments of a call that has to be quick: read one after the other, straight from where
// the interpreter holds them (METH_FASTCALL).
//
// pybind11 finds out at every call which overload fits, and makes a tuple and casters for it;
// for a collective of a few bytes that takes longer than the collective. Only the package's own
// Communicator calls these methods: what a call has anyway comes first, always in the same order,
// and the options follow by name (KeywordArguments). What a user may get wrong still is an error
// that names it.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace dpcore {

class CallArguments {
 public:
  CallArguments(PyObject* const* values, Py_ssize_t count) : next_(values), end_(values + count) {}

  pybind11::handle object() {
    if (next_ == end_) {
      throw pybind11::type_error("too few arguments");
    }
    return *next_++;
  }
  static std::string_view text_of(pybind11::handle value, const char* name) {
    Py_ssize_t size = 0;
    const char* data =
        PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), &size) : nullptr;
    if (data == nullptr) {
      throw unfit(name, "a string", value);
    }
    return {data, static_cast<size_t>(size)};
  }
  static double real_of(pybind11::handle value, const char* name) {
    const double result = PyFloat_AsDouble(value.ptr());
    if (result == -1.0 && PyErr_Occurred() != nullptr) {
      throw unfit(name, "a number", value);
    }
    return result;
  }
  // Seconds; 0 stands for the communicator's.
  static double timeout_of(pybind11::handle value, const char* name) {
    const double seconds = real_of(value, name);
    if (!(seconds >= 0)) {
      throw unfit(name, "seconds, or 0 for the communicator's", value);
    }
    return seconds;
  }
  static int integer_of(pybind11::handle value, const char* name) {
    const int64_t result = PyLong_AsLongLong(value.ptr());
    const bool failed = result == -1 && PyErr_Occurred() != nullptr;
    if (failed && PyErr_ExceptionMatches(PyExc_OverflowError) == 0) {
      throw unfit(name, "an integer", value);
    }
    if (failed || result != static_cast<int>(result)) {
      PyErr_Clear();
      throw pybind11::value_error(std::string(name) + " " + std::string(pybind11::str(value)) +
                                  " is out of range");
    }
    return static_cast<int>(result);
  }
  static uint64_t natural_of(pybind11::handle value, const char* name) {
    const auto index = pybind11::reinterpret_steal<pybind11::object>(PyNumber_Index(value.ptr()));
    const uint64_t result = index ? PyLong_AsUnsignedLongLong(index.ptr()) : ~uint64_t{0};
    if (result == ~uint64_t{0} && PyErr_Occurred() != nullptr) {
      throw unfit(name, "an integer of 0 to 2**64 - 1", value);
    }
    return result;
  }
  static bool flag_of(pybind11::handle value, const char* name) {
    const int result = PyObject_IsTrue(value.ptr());
    if (result < 0) {
      throw unfit(name, "True or False", value);
    }
    return result == 1;
  }

  // None, or what is long for each rank.
  static std::optional<std::vector<uint64_t>> sizes_of(pybind11::handle value, const char* name) {
    if (value.is_none()) {
      return std::nullopt;
    }
    try {
      std::vector<uint64_t> result;
      for (const pybind11::handle entry : pybind11::reinterpret_borrow<pybind11::object>(value)) {
        result.push_back(entry.cast<uint64_t>());
      }
      return result;
    } catch (const pybind11::builtin_exception&) {
    } catch (const pybind11::error_already_set&) {
    }
    throw unfit(name, "a sequence of sizes (integers that are not negative)", value);
  }

  // Clears Python's error.
  static pybind11::type_error unfit(const char* name, const char* wanted, pybind11::handle value) {
    PyErr_Clear();
    return pybind11::type_error(std::string(name) + ": expected " + wanted + ", not " +
                                std::string(pybind11::repr(value)));
  }

 private:
  PyObject* const* next_;
  PyObject* const* end_;
};

// Names in a program's text are interned, and so are these: the same name is the same object.
template <size_t count>
std::array<PyObject*, count> interned(const std::array<const char*, count>& texts) {
  std::array<PyObject*, count> names{};
  for (size_t i = 0; i < count; ++i) {
    names[i] = PyUnicode_InternFromString(texts[i]);
  }
  return names;
}

// The options of collectives and messages, by name; one that was not given has a null handle.
class KeywordArguments {
 public:
  enum Name {
    op,
    factor,
    root,
    input_sizes,
    output_sizes,
    algorithm,
    priority,
    timeout,
    layout,
    async_op,
    tag,
    kNames
  };

  KeywordArguments(PyObject* const* values, PyObject* names) {
    const Py_ssize_t count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < count; ++i) {
      values_[index_of(PyTuple_GET_ITEM(names, i))] = values[i];
    }
  }
  pybind11::handle operator[](Name name) const { return values_[name]; }
  // `value` keeps its default where the option was not given. `convert(handle, name)` reads it.
  template <class Value, class Convert>
  void read(Name name, Value& value, Convert convert) const {
    if (values_[name] != nullptr) {
      value = convert(pybind11::handle(values_[name]), kTexts[name]);
    }
  }

 private:
  static constexpr std::array<const char*, kNames> kTexts = {
      "op",       "factor",  "root",   "input_sizes", "output_sizes", "algorithm",
      "priority", "timeout", "layout", "async_op",    "tag"};

  static size_t index_of(PyObject* name) {
    static const auto known = interned(kTexts);
    for (size_t i = 0; i < kNames; ++i) {
      if (known[i] == name) {
        return i;
      }
    }
    throw pybind11::type_error("no option " + std::string(pybind11::repr(name)));
  }

  std::array<PyObject*, kNames> values_{};
};

// An argument of a function that pybind11 calls. What does not fit is an error that names the
// argument, instead of pybind11's list of signatures. `read` is one of the functions above.
template <size_t size>
struct ArgumentName {
  constexpr ArgumentName(const char (&name)[size]) { std::copy_n(name, size, text); }
  char text[size];
};
template <ArgumentName name, auto read>
struct NamedArgument {
  using Value = decltype(read(pybind11::handle(), name.text));
  Value value{};
  operator Value() const { return value; }
};
template <ArgumentName name>
using TextArgument = NamedArgument<name, CallArguments::text_of>;
template <ArgumentName name>
using IntegerArgument = NamedArgument<name, CallArguments::integer_of>;
template <ArgumentName name>
using NaturalArgument = NamedArgument<name, CallArguments::natural_of>;
template <ArgumentName name>
using RealArgument = NamedArgument<name, CallArguments::real_of>;
template <ArgumentName name>
using FlagArgument = NamedArgument<name, CallArguments::flag_of>;

// Adds a method that reads its arguments itself: `body(Class&, self, CallArguments&)`, or
// `body(Class&, self, CallArguments&, const KeywordArguments&)`.
template <class Class, auto body>
void define_quick_method(pybind11::handle type, const char* name) {
  constexpr bool takes_names = std::is_invocable_v<decltype(body), Class&, pybind11::handle,
                                                   CallArguments&, const KeywordArguments&>;
  constexpr auto call = [](PyObject* self, PyObject* const* values, Py_ssize_t count,
                           PyObject* names) -> PyObject* {
    try {
      auto* instance = reinterpret_cast<pybind11::detail::instance*>(self);
      auto* object = instance->get_value_and_holder().template value_ptr<Class>();
      CallArguments arguments(values, count);
      if constexpr (takes_names) {
        const KeywordArguments options(values + count, names);
        return body(*object, self, arguments, options).release().ptr();
      } else {
        return body(*object, self, arguments).release().ptr();
      }
    } catch (pybind11::error_already_set& problem) {
      problem.restore();
    } catch (...) {
      pybind11::detail::try_translate_exceptions();
    }
    return nullptr;
  };
  using Call = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
  static PyMethodDef definition{};
  definition = {name,
                reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(static_cast<Call>(call))),
                METH_FASTCALL | METH_KEYWORDS, nullptr};
  // The descriptor checks that `self` is of the type.
  auto* owner = reinterpret_cast<PyTypeObject*>(type.ptr());
  type.attr(name) =
      pybind11::reinterpret_steal<pybind11::object>(PyDescr_NewMethod(owner, &definition));
}

}  // namespace dpcore

namespace pybind11::detail {

template <dpcore::ArgumentName argument, auto read>
struct type_caster<dpcore::NamedArgument<argument, read>> {
  using Argument = dpcore::NamedArgument<argument, read>;
  using Value = intrinsic_t<typename Argument::Value>;
  PYBIND11_TYPE_CASTER(Argument, make_caster<Value>::name);
  bool load(handle from, bool) {
    value.value = read(from, argument.text);
    return true;
  }
};

}  // namespace pybind11::detail
