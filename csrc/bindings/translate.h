// Errors of the core as the Python classes of dpcore.errors.
#pragma once

#include <exception>

namespace dpcore {

// Sets the Python error (with the GIL held); false when `problem` is none of the core's.
bool set_python_error(const std::exception_ptr& problem);

}  // namespace dpcore
