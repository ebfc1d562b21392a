// A name may belong to some collectives only: then it is theirs, and the others choose.
#include "comm/schedule/names.h"

#include <algorithm>
#include <set>

#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr std::string_view kAuto = "auto";

AskedAlgorithm parse(const std::string& text) {
  const bool literal = text.ends_with(kLiteral);
  return {literal ? text.substr(0, text.size() - kLiteral.size()) : text, literal};
}

bool is_algorithm_of(Collective collective, const std::string& name) {
  const std::vector<std::string> known = algorithms_of(collective);
  return std::find(known.begin(), known.end(), name) != known.end();
}

}  // namespace

AskedAlgorithm resolve_algorithm(Collective collective, const std::string& asked,
                                 const std::string& fallback) {
  const bool is_own = asked.empty();
  AskedAlgorithm algorithm = parse(is_own ? fallback : asked);
  if (is_own && !algorithm.is_open() && !is_algorithm_of(collective, algorithm.name)) {
    return {};
  }
  return algorithm;
}

void check_algorithm_name(const std::string& name) {
  std::set<std::string> known;
  for (int kind = 0; kind < kCollectiveCount; ++kind) {
    for (const std::string& algorithm : algorithms_of(static_cast<Collective>(kind))) {
      known.insert(algorithm);
    }
  }
  if (name != kAuto && !known.contains(parse(name).name)) {
    std::string list(kAuto);
    for (const std::string& algorithm : known) {
      list += ", " + algorithm;
    }
    throw Unsupported("algorithm '" + name + "' does not exist; there are " + list + "; '" +
                      std::string(kLiteral) +
                      "' may stand behind a name, and dpcore.algorithms_of(collective) lists "
                      "those of one collective");
  }
}

}  // namespace dpcore
