// Prints where what lies in an arena, as JSON for `dpcore inspect`, which reads the memory of
// another process while that process hangs. setup.py compiles and runs it, so the offsets are the
// compiler's and the reader cannot get out of step with csrc/comm/memory/control.h. It includes
// the one source that it needs and nothing of torch or Python: that takes a second.
#include "comm/base/types.cpp"

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "comm/base/error.h"
#include "comm/memory/control.h"

namespace dpcore {
namespace {

std::string quoted(std::string_view text) { return '"' + std::string(text) + '"'; }

// "name": [offset, bytes, signed]
template <class Type>
std::string field(const char* name, size_t offset) {
  constexpr bool is_signed = std::is_signed_v<Type> || std::is_same_v<Type, std::atomic<int64_t>> ||
                             std::is_same_v<Type, std::atomic<int32_t>>;
  return quoted(name) + ": [" + std::to_string(offset) + ", " + std::to_string(sizeof(Type)) +
         (is_signed ? ", true]" : ", false]");
}

#define FIELD(type, name) field<decltype(type::name)>(#name, offsetof(type, name))

template <class Enum>
void print_names(const char* of, int count) {
  std::string list;
  for (int i = 0; i < count; ++i) {
    list += (i == 0 ? "" : ", ") + quoted(name_of(static_cast<Enum>(i)));
  }
  std::printf(" \"%s\": [%s],\n", of, list.c_str());
}

void print_layout() {
  std::string sizes;
  const auto add = [&](const char* name, size_t size, std::initializer_list<std::string> fields) {
    sizes += (sizes.empty() ? "" : ", ") + quoted(name) + ": " + std::to_string(size);
    std::string list;
    for (const std::string& one : fields) {
      list += (list.empty() ? "" : ", ") + one;
    }
    std::printf(" \"%s\": {%s},\n", name, list.c_str());
  };
  std::printf("{\n");
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
  print_names<Collective>("collectives", kCollectiveCount);
  print_names<DType>("dtypes", kDTypeCount);
  print_names<ReduceOp>("ops", kReduceOpCount);
  print_names<ErrorKind>("errors", static_cast<int>(kErrorClasses.size()));
  std::printf(" \"sizes\": {%s},\n", sizes.c_str());
  std::printf(" \"magic\": %llu, \"version\": %d, \"history\": %d\n}\n",
              static_cast<unsigned long long>(kControlMagic), static_cast<int>(kLayoutVersion),
              static_cast<int>(kHistory));
}

#undef FIELD

}  // namespace
}  // namespace dpcore

int main() { dpcore::print_layout(); }
