// An error of the program itself, which no operation has failed with.
#pragma once

#include <string>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/group/endpoint.h"

namespace dpcore {

// Peers hear of it if they still need this rank when it leaves. What failed before goes first.
inline void note_program_error(Endpoint& endpoint, const std::string& error) {
  FirstFailure cause;
  cause.kind = static_cast<uint32_t>(ErrorKind::peer_lost);
  cause.culprit = endpoint.rank();
  cause.when_ns = now_ns();
  cause.text = error;
  endpoint.note_failure(cause);
}

}  // namespace dpcore
