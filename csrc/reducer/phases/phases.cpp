// The four valid lists of phases, by name. See phases.h.
#include "reducer/phases/phases.h"

#include <array>

#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr std::array kPhases = {Phase::all_reduce, Phase::reduce_scatter, Phase::update,
                                Phase::all_gather};

const std::vector<std::vector<Phase>>& all_lists() {
  static const std::vector<std::vector<Phase>> all = {
      {Phase::all_reduce},
      {Phase::all_reduce, Phase::update},
      {Phase::reduce_scatter, Phase::all_gather, Phase::update},
      {Phase::reduce_scatter, Phase::update, Phase::all_gather}};
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

std::string name_of(Phase phase) {
  switch (phase) {
    case Phase::all_reduce:
      return "all_reduce";
    case Phase::reduce_scatter:
      return "reduce_scatter";
    case Phase::update:
      return "update";
    case Phase::all_gather:
      return "all_gather";
  }
  return "";
}

Phases::Phases(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    for (const Phase phase : kPhases) {
      if (name_of(phase) == name) {
        list_.push_back(phase);
      }
    }
  }
  std::string list;
  for (const std::vector<Phase>& known : all_lists()) {
    if (list_ == known && list_.size() == names.size()) {
      return;
    }
    std::vector<std::string> words;
    for (const Phase phase : known) {
      words.push_back(name_of(phase));
    }
    list += (list.empty() ? "" : ", ") + in_words(words);
  }
  throw Unsupported("phases " + in_words(names) + ": a bucket may have " + list);
}

}  // namespace dpcore
