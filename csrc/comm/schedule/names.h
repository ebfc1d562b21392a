// What programs may write behind algorithm=: a name that some collective has, "auto", and either
// way of running it. Pure functions, for communicators on hosts and on devices alike.
#pragma once

#include <string>
#include <string_view>

#include "comm/schedule/schedule.h"

namespace dpcore {

// Behind a name: run its list of moves as it stands, though there is a faster path.
inline constexpr std::string_view kLiteral = "/moves";

struct AskedAlgorithm {
  std::string name = "auto";  // without the suffix; this leaves the choice to the communicator
  bool literal = false;       // whether the suffix was there
  bool is_open() const { return name == "auto" && !literal; }
};

// What a call runs that asks for `asked`, on a communicator whose own algorithm is `fallback`: an
// empty `asked` means that one, where the collective has it, and otherwise "auto". A name that was
// asked for is not looked up: make_schedule() refuses one that the collective lacks.
AskedAlgorithm resolve_algorithm(Collective collective, const std::string& asked,
                                 const std::string& fallback);
// Throws Unsupported, listing what there is, when no collective has it.
void check_algorithm_name(const std::string& name);

}  // namespace dpcore
