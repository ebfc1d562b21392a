// What a caller says of itself as it enters a collective: 64 bytes, which all ranks have when it is
// over. The core hands words on, in the slot of the operation or in the frame that announces the
// entry, and does not read them. Here because the reducer and the memory that ranks share both name
// it.
#pragma once

#include <cstdint>
#include <vector>

namespace dpcore {

struct Word {
  uint64_t parts[8];
};

// The word of a call and, once every rank has entered it, those of all ranks. Made by the caller,
// with room for them; it may read `all` when the operation is over.
struct Words {
  Word own{};
  std::vector<Word> all;
};

}  // namespace dpcore
