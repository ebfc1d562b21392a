// Algorithms as Python asks for them: a name, FILE:NAME, a function of the number of ranks, or a
// Schedule. A program of moves is proved and compiled when it is first asked for, and kept.
//
// Of one thread at a time, with the GIL, which also has to be held when it goes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/schedule/program.h"

namespace dpcore {

class KnownAlgorithms {
 public:
  // For this rank of so many. None: the communicator's own. Throws what is wrong with it.
  std::shared_ptr<const CallAlgorithm> of(pybind11::handle asked, int rank, int world);
  void clear() { known_.clear(); }

 private:
  struct Entry {
    pybind11::object asked;
    std::shared_ptr<const CallAlgorithm> algorithm;
  };
  static constexpr size_t kMost = 32;  // a program may make a new one for each call
  std::vector<Entry> known_;
  size_t oldest_ = 0;
};

}  // namespace dpcore
