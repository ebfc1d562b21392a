// Which algorithm "auto" means where data has to travel as messages.
//
// A pure function of what all ranks agree on, so that all choose alike.
#pragma once

#include <string>

#include "comm/types.h"

namespace dpcore {

// Between ranks that share no memory, for data that is not small. Only ordered algorithms: the
// result is then the same as within a host, bit for bit.
std::string algorithm_by_messages(Collective collective, int world);

}  // namespace dpcore
