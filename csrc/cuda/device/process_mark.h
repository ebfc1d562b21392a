// Which process this is, among all of the host. Numbers of processes do not say it: in containers
// each of two processes may be number 17.
#pragma once

#include <cstdint>

namespace dpcore {

// Drawn at random when it is first asked for; a forked child draws anew. Throws Error where the
// system gives no random numbers.
uint64_t process_mark();

}  // namespace dpcore
