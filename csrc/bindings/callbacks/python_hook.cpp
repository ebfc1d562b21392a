// See python_hook.h. Each call takes the GIL; the object is dropped with it too.
#include "bindings/callbacks/python_hook.h"

#include <utility>

namespace py = pybind11;

namespace dpcore {
namespace {

class PythonHook final : public BucketHook {
 public:
  explicit PythonHook(py::object runner) : runner_(std::move(runner)) {}
  ~PythonHook() override {
    const py::gil_scoped_acquire gil;
    runner_ = {};
  }

  void start(size_t slot, const at::Tensor&, const BucketCall&) override { call("start", slot); }
  void wait(size_t slot, const at::Tensor&) override { call("wait", slot); }
  void abandon(size_t slot) override { call("abandon", slot); }
  void buckets_changed(size_t buckets) override { call("buckets_changed", buckets); }

 private:
  void call(const char* method, size_t number) {
    const py::gil_scoped_acquire gil;
    runner_.attr(method)(number);
  }

  py::object runner_;
};

}  // namespace

std::unique_ptr<BucketHook> python_hook(py::object runner) {
  return std::make_unique<PythonHook>(std::move(runner));
}

}  // namespace dpcore
