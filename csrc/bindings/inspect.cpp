// `_C.control_layout()`: where what lies in an arena, for `dpcore inspect`, which reads the memory
// of another process while that process hangs. The offsets come from the compiler, so the reader
// cannot get out of step with csrc/comm/memory/control.h.
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <type_traits>

#include "comm/base/types.h"
#include "comm/group/group.h"
#include "comm/memory/control.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// {name: (offset, bytes, signed)}
template <class Field>
void put(py::dict& fields, const char* name, size_t offset) {
  fields[name] =
      py::make_tuple(offset, sizeof(Field),
                     std::is_signed_v<Field> || std::is_same_v<Field, std::atomic<int64_t>> ||
                         std::is_same_v<Field, std::atomic<int32_t>>);
}

#define DPCORE_FIELD(fields, type, name) \
  put<decltype(type::name)>(fields, #name, offsetof(type, name))

py::dict header_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, ArenaHeader, magic);
  DPCORE_FIELD(fields, ArenaHeader, version);
  DPCORE_FIELD(fields, ArenaHeader, process);
  DPCORE_FIELD(fields, ArenaHeader, root_control_offset);
  return fields;
}

py::dict mirrors_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, MirrorHeader, magic);
  DPCORE_FIELD(fields, MirrorHeader, version);
  DPCORE_FIELD(fields, MirrorHeader, process);
  DPCORE_FIELD(fields, MirrorHeader, first);
  DPCORE_FIELD(fields, MirrorHeader, stride);
  return fields;
}

py::dict message_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, MessageWait, seen_ns);
  DPCORE_FIELD(fields, MessageWait, since_ns);
  DPCORE_FIELD(fields, MessageWait, tag);
  DPCORE_FIELD(fields, MessageWait, bytes);
  DPCORE_FIELD(fields, MessageWait, peer);
  DPCORE_FIELD(fields, MessageWait, sends);
  return fields;
}

py::dict where_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, Whereabouts, changes);
  DPCORE_FIELD(fields, Whereabouts, seen_ns);
  DPCORE_FIELD(fields, Whereabouts, since_ns);
  DPCORE_FIELD(fields, Whereabouts, operations);
  DPCORE_FIELD(fields, Whereabouts, text);
  return fields;
}

py::dict control_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, ControlBlock, magic);
  DPCORE_FIELD(fields, ControlBlock, version);
  DPCORE_FIELD(fields, ControlBlock, rank);
  DPCORE_FIELD(fields, ControlBlock, world);
  DPCORE_FIELD(fields, ControlBlock, member);
  DPCORE_FIELD(fields, ControlBlock, job);
  DPCORE_FIELD(fields, ControlBlock, group);
  DPCORE_FIELD(fields, ControlBlock, left);
  DPCORE_FIELD(fields, ControlBlock, operations_seen);
  DPCORE_FIELD(fields, ControlBlock, alive_ns);
  DPCORE_FIELD(fields, ControlBlock, abort);
  DPCORE_FIELD(fields, ControlBlock, message);
  DPCORE_FIELD(fields, ControlBlock, where);
  DPCORE_FIELD(fields, ControlBlock, history);
  return fields;
}

py::dict abort_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, AbortRecord, state);
  DPCORE_FIELD(fields, AbortRecord, kind);
  DPCORE_FIELD(fields, AbortRecord, culprit);
  DPCORE_FIELD(fields, AbortRecord, when_ns);
  DPCORE_FIELD(fields, AbortRecord, reason);
  return fields;
}

py::dict history_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, HistoryEntry, number);
  DPCORE_FIELD(fields, HistoryEntry, fingerprint);
  DPCORE_FIELD(fields, HistoryEntry, bytes);
  DPCORE_FIELD(fields, HistoryEntry, begin_ns);
  DPCORE_FIELD(fields, HistoryEntry, end_ns);
  return fields;
}

py::dict fingerprint_fields() {
  py::dict fields;
  DPCORE_FIELD(fields, Fingerprint, collective);
  DPCORE_FIELD(fields, Fingerprint, dtype);
  DPCORE_FIELD(fields, Fingerprint, op);
  DPCORE_FIELD(fields, Fingerprint, root);
  DPCORE_FIELD(fields, Fingerprint, count);
  return fields;
}

#undef DPCORE_FIELD

template <class Enum>
py::list names(int count) {
  py::list list;
  for (int i = 0; i < count; ++i) {
    list.append(std::string(name_of(static_cast<Enum>(i))));
  }
  return list;
}

py::dict control_layout() {
  py::dict layout;
  layout["magic"] = kControlMagic;
  layout["version"] = kLayoutVersion;
  layout["history"] = kHistory;
  layout["sizes"] = py::dict(
      py::arg("header") = sizeof(ArenaHeader), py::arg("control") = sizeof(ControlBlock),
      py::arg("abort") = sizeof(AbortRecord), py::arg("history_entry") = sizeof(HistoryEntry),
      py::arg("fingerprint") = sizeof(Fingerprint), py::arg("mirrors") = sizeof(MirrorHeader),
      py::arg("message") = sizeof(MessageWait), py::arg("where") = sizeof(Whereabouts));
  layout["header"] = header_fields();
  layout["control"] = control_fields();
  layout["abort"] = abort_fields();
  layout["history_entry"] = history_fields();
  layout["fingerprint"] = fingerprint_fields();
  layout["mirrors"] = mirrors_fields();
  layout["message"] = message_fields();
  layout["where"] = where_fields();
  layout["collectives"] = names<Collective>(kCollectiveCount);
  layout["dtypes"] = names<DType>(kDTypeCount);
  layout["ops"] = names<ReduceOp>(kReduceOpCount);
  layout["errors"] = names<ErrorKind>(static_cast<int>(kErrorClasses.size()));
  return layout;
}

}  // namespace

void register_inspect(py::module_& m) {
  m.def("control_layout", &control_layout,
        "Where the fields of an arena's black box lie: {struct: {field: (offset, bytes, signed)}}, "
        "with the names behind the numbers.");
}

}  // namespace dpcore
