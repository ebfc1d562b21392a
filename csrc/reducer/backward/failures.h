// What the reducer says when something went wrong: which rank, which bucket, what to do.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "reducer/bucket/bucket.h"

namespace dpcore {

// The first error of a bucket on its way.
struct StepFailure {
  std::string model;   // its name in messages
  std::string advice;  // about a Mismatch, appended to it
  std::exception_ptr first;

  void note(std::exception_ptr error) {
    if (!first) {
      first = std::move(error);
    }
  }
  // In a catch block: throws the error as one of dpcore's, with what it is about in front.
  [[noreturn]] void raise_about(const std::string& what, uint64_t step,
                                const std::string& after = "");
};

std::string step_in_words(uint64_t step);

// Autograd has made the parameter a new place to add gradients to, without our hook.
[[noreturn]] void raise_changed(int rank, const Gradient& gradient);
// The next forward has come; `iteration` has not all gradients.
[[noreturn]] void raise_incomplete(int rank, const std::vector<Gradient>& gradients,
                                   uint64_t iteration, uint64_t step, bool is_graph_static);
[[noreturn]] void raise_too_late(int rank, const Gradient& gradient);

}  // namespace dpcore
