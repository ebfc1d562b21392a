// A variable of the environment that turns something on or off. Anything but 0 and 1 is an error,
// so that a word such as "no" does not quietly leave on what it was meant to turn off.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "comm/base/error.h"

namespace dpcore {

// What the variable says; nothing where it is not set, or empty.
inline std::optional<bool> switch_of(const char* name) {
  const char* text = std::getenv(name);
  const std::string_view said = text == nullptr ? "" : text;
  if (said.empty()) {
    return std::nullopt;
  }
  if (said != "0" && said != "1") {
    throw Unsupported(std::string(name) + "=" + std::string(said) + ": use 0 or 1");
  }
  return said == "1";
}

}  // namespace dpcore
