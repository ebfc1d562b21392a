// See journey.h.
#include "reducer/launch/journey.h"

#include <array>

#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr std::array kLegs = {Leg::all_reduce, Leg::reduce_scatter, Leg::update, Leg::all_gather};

const std::vector<std::vector<Leg>>& all_journeys() {
  static const std::vector<std::vector<Leg>> all = {
      {Leg::all_reduce},
      {Leg::all_reduce, Leg::update},
      {Leg::reduce_scatter, Leg::all_gather, Leg::update},
      {Leg::reduce_scatter, Leg::update, Leg::all_gather}};
  return all;
}

std::string in_words(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return "[" + text + "]";
}

}  // namespace

std::string name_of(Leg leg) {
  switch (leg) {
    case Leg::all_reduce:
      return "all_reduce";
    case Leg::reduce_scatter:
      return "reduce_scatter";
    case Leg::update:
      return "update";
    case Leg::all_gather:
      return "all_gather";
  }
  return "";
}

Journey::Journey(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    for (const Leg leg : kLegs) {
      if (name_of(leg) == name) {
        legs_.push_back(leg);
      }
    }
  }
  std::string list;
  for (const std::vector<Leg>& known : all_journeys()) {
    if (legs_ == known && legs_.size() == names.size()) {
      return;
    }
    std::vector<std::string> words;
    for (const Leg leg : known) {
      words.push_back(name_of(leg));
    }
    list += (list.empty() ? "" : ", ") + in_words(words);
  }
  throw Unsupported("journey " + in_words(names) + ": the journeys there are: " + list);
}

}  // namespace dpcore
