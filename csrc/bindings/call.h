// The optional arguments that all collectives share, as Python gave them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "comm/operations/collective_operation.h"

namespace dpcore {

struct Call {
  std::string algorithm;
  std::shared_ptr<const Program> program;
  int priority = 0;
  double timeout = 0;
  uint64_t layout = 0;
  bool asynchronous = false;
};

// A schedule of the caller's own has to be one for this call. Throws Unsupported.
void check_program(const Program& program, const Request& request, int world);

}  // namespace dpcore
