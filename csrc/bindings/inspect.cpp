// `_C.control_layout()`: where what lies in an arena, for `dpcore inspect`, which reads the memory
// of another process while that process hangs. The offsets come from the compiler, so the reader
// cannot get out of step with csrc/comm/memory/control.h.
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "comm/base/clock.h"
#include "comm/base/types.h"
#include "comm/engine/engine.h"
#include "comm/group/group.h"
#include "comm/memory/control.h"

namespace py = pybind11;

namespace dpcore {
namespace {

// A field's name and (offset, bytes, signed).
template <class Type>
py::tuple field(const char* name, size_t offset) {
  constexpr bool is_signed = std::is_signed_v<Type> || std::is_same_v<Type, std::atomic<int64_t>> ||
                             std::is_same_v<Type, std::atomic<int32_t>>;
  return py::make_tuple(name, py::make_tuple(offset, sizeof(Type), is_signed));
}

#define FIELD(type, name) field<decltype(type::name)>(#name, offsetof(type, name))

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
  py::dict sizes;
  layout["sizes"] = sizes;
  const auto add = [&](const char* name, size_t size, std::initializer_list<py::tuple> fields) {
    sizes[name] = size;
    layout[name] = py::dict();
    for (const py::tuple& one : fields) {
      layout[name][one[0]] = one[1];
    }
  };
  add("header", sizeof(ArenaHeader),
      {FIELD(ArenaHeader, magic), FIELD(ArenaHeader, version), FIELD(ArenaHeader, process),
       FIELD(ArenaHeader, root_control_offset)});
  add("control", sizeof(ControlBlock),
      {FIELD(ControlBlock, magic), FIELD(ControlBlock, version), FIELD(ControlBlock, rank),
       FIELD(ControlBlock, world), FIELD(ControlBlock, member), FIELD(ControlBlock, job),
       FIELD(ControlBlock, group), FIELD(ControlBlock, left), FIELD(ControlBlock, operations_seen),
       FIELD(ControlBlock, alive_ns), FIELD(ControlBlock, abort), FIELD(ControlBlock, message),
       FIELD(ControlBlock, placement), FIELD(ControlBlock, history)});
  add("abort", sizeof(AbortRecord), {FIELD(AbortRecord, state), FIELD(AbortRecord, failure)});
  add("failure", sizeof(FailureRecord),
      {FIELD(FailureRecord, kind), FIELD(FailureRecord, culprit), FIELD(FailureRecord, when_ns),
       FIELD(FailureRecord, reason)});
  add("history_entry", sizeof(HistoryEntry),
      {FIELD(HistoryEntry, number), FIELD(HistoryEntry, fingerprint), FIELD(HistoryEntry, bytes),
       FIELD(HistoryEntry, begin_ns), FIELD(HistoryEntry, end_ns)});
  add("fingerprint", sizeof(Fingerprint),
      {FIELD(Fingerprint, collective), FIELD(Fingerprint, dtype), FIELD(Fingerprint, op),
       FIELD(Fingerprint, root), FIELD(Fingerprint, count)});
  add("mirrors", sizeof(MirrorHeader),
      {FIELD(MirrorHeader, magic), FIELD(MirrorHeader, version), FIELD(MirrorHeader, process),
       FIELD(MirrorHeader, first), FIELD(MirrorHeader, stride)});
  add("message", sizeof(MessageWait),
      {FIELD(MessageWait, seen_ns), FIELD(MessageWait, since_ns), FIELD(MessageWait, tag),
       FIELD(MessageWait, bytes), FIELD(MessageWait, peer), FIELD(MessageWait, sends)});
  add("placement", sizeof(Placement),
      {FIELD(Placement, changes), FIELD(Placement, seen_ns), FIELD(Placement, since_ns),
       FIELD(Placement, operations), FIELD(Placement, text)});
  layout["collectives"] = names<Collective>(kCollectiveCount);
  layout["dtypes"] = names<DType>(kDTypeCount);
  layout["ops"] = names<ReduceOp>(kReduceOpCount);
  layout["errors"] = names<ErrorKind>(static_cast<int>(kErrorClasses.size()));
  return layout;
}

#undef FIELD

}  // namespace

void register_inspect(py::module_& m) {
  m.def(
      "longest_wait",
      [] {
        const int64_t now = now_ns();
        const LongWait wait = longest_wait(now);
        const int64_t so_far = wait.called_ns == 0 ? 0 : now - wait.called_ns;
        return py::make_tuple(static_cast<double>(so_far) * 1e-9, wait.timeout_s);
      },
      "Of what this process waits in, the operation that was called first: the seconds since then, "
      "and its timeout. Zeros where it waits for nothing.");
  m.def("control_layout", &control_layout,
        "Where the fields of an arena's black box lie: {struct: {field: (offset, bytes, signed)}}, "
        "with the names behind the numbers.");
}

}  // namespace dpcore
