// A name may belong to some collectives only: then it is theirs, and the others choose.
#include "comm/schedule/names.h"

#include <algorithm>
#include <set>

#include "comm/base/error.h"

namespace dpcore {

std::string without_suffix(const std::string& name) {
  return name.ends_with(kLiteral) ? name.substr(0, name.size() - kLiteral.size()) : name;
}

bool is_algorithm_of(Collective collective, const std::string& name) {
  const std::vector<std::string> known = algorithms_of(collective);
  return std::find(known.begin(), known.end(), name) != known.end();
}

void check_algorithm_name(const std::string& name) {
  std::set<std::string> known;
  for (int kind = 0; kind < kCollectiveCount; ++kind) {
    for (const std::string& algorithm : algorithms_of(static_cast<Collective>(kind))) {
      known.insert(algorithm);
    }
  }
  if (name != "auto" && !known.contains(without_suffix(name))) {
    std::string list = "auto";
    for (const std::string& algorithm : known) {
      list += ", " + algorithm;
    }
    throw Unsupported("algorithm '" + name + "' does not exist; there are " + list);
  }
}

}  // namespace dpcore
