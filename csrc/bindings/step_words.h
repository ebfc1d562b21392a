// A rank's word of each step (reducer/backward/step_words.h), as Python writes and reads it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "comm/base/word.h"
#include "reducer/reducer.h"

namespace dpcore {

// A tuple for each rank: the fields of StepWords::Said in their order.
pybind11::list heard(const std::vector<Word>& words);
// The methods of dpcore._C.Reducer about words.
void register_step_words(pybind11::class_<Reducer, std::shared_ptr<Reducer>>& reducer);

}  // namespace dpcore
