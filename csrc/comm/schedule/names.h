// What programs may write behind algorithm=: a name that some collective has, "auto", and either
// way of running it. Pure functions.
#pragma once

#include <string>
#include <string_view>

#include "comm/schedule/schedule.h"

namespace dpcore {

// Behind a name: run its list of moves as it stands, though there is a faster path.
inline constexpr std::string_view kLiteral = "/moves";
std::string without_suffix(const std::string& name);
bool is_algorithm_of(Collective collective, const std::string& name);
// Throws Unsupported, listing what there is, when no collective has it.
void check_algorithm_name(const std::string& name);

}  // namespace dpcore
