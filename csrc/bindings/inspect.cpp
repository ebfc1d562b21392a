// `_C.longest_wait()`: what a rank waits in, for the thread that explains a long wait.
#include <pybind11/pybind11.h>

#include "comm/base/clock.h"
#include "comm/engine/engine.h"
#include "comm/group/group.h"

namespace py = pybind11;

namespace dpcore {

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
}

}  // namespace dpcore
