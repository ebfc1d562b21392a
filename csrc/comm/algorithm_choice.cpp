// The owner of a part takes it from all and gives it to all: 2 steps and 2(N-1)/N of the data,
// the fewest bytes there are. With two ranks that have a root a single step does.
#include "comm/algorithm_choice.h"

namespace dpcore {

std::string algorithm_by_messages(Collective collective, int world) {
  switch (collective) {
    case Collective::all_reduce:
      return "two_shot";
    case Collective::broadcast:
    case Collective::reduce:
      return world > 2 ? "two_shot" : "direct";
    default:
      return "direct";
  }
}

}  // namespace dpcore
