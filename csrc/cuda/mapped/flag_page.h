// The words on the host by which a rank's stream and kernels synchronise with those of its peers:
// one page per rank, in the host's arena, which all devices of the host can access.
//
// Every word has one writer while all is well, the page's owner (its streams and kernels), and one
// reader besides it. When the communicator fails, a rank raises words of others that only its own
// streams wait for. Numbers start shortly before 2^32, so that every run comes around there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/share_sync.h"

namespace dpcore {

struct FlagPage {
  struct alignas(64) Line {  // of the cache: no two words in one
    uint32_t value;
  };
  Line sent[kBarrierRanks];     // by peer: fragments in the mailbox towards it
  Line taken[kBarrierRanks];    // by peer: fragments taken out of its mailbox
  Line arrived[kBarrierRanks];  // by peer: barriers that this rank has come to
  Line given_up;                // not 0: nothing of this rank touches others' memory any more
  Line late;                    // the rank a kernel waits for (LatePeer)
};

inline constexpr size_t kFlagAlignment = 4096;
inline constexpr size_t kFlagBytes =
    (sizeof(FlagPage) + kFlagAlignment - 1) / kFlagAlignment * kFlagAlignment;

inline constexpr uint32_t kFirstNumber = 0u - 40u;
// Further than any number in use can be behind: the comparison goes around at 2^32.
inline constexpr uint32_t kReleased = 1u << 30;

inline void prepare(FlagPage& page) {
  for (int r = 0; r < kBarrierRanks; ++r) {
    page.sent[r].value = page.taken[r].value = page.arrived[r].value = kFirstNumber;
  }
  page.given_up.value = 0;
  page.late.value = 0;
}

}  // namespace dpcore
