// Releases the GIL during a wait for a thread that may need it.
#pragma once

#include <Python.h>

namespace dpcore {

class WithoutPythonLock {
 public:
  WithoutPythonLock() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      held_ = PyEval_SaveThread();
    }
  }
  ~WithoutPythonLock() {
    if (held_ != nullptr) {
      PyEval_RestoreThread(held_);
    }
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  PyThreadState* held_ = nullptr;
};

}  // namespace dpcore
