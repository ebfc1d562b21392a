// See failures.h.
#include "reducer/backward/failures.h"

#include "comm/base/error.h"

namespace dpcore {
namespace {

constexpr size_t kNamesInMessages = 8;

}  // namespace

void StepFailure::raise_about(const std::string& what, uint64_t step, const std::string& after) {
  const std::string where = what + " of " + model + ", " + step_in_words(step) + ": ";
  try {
    throw;
  } catch (const Error& problem) {
    const bool differs = problem.kind() == ErrorKind::mismatch;
    try {
      throw_as(problem.kind(), where + problem.what() + (differs ? advice : after));
    } catch (const Error&) {
      note(std::current_exception());
      throw;
    }
  }
}

std::string step_in_words(uint64_t step) { return "step " + std::to_string(step); }

void raise_changed(int rank, const Gradient& gradient) {
  const auto in_words = [](const at::TensorOptions& kind) {
    return std::string(c10::toString(c10::typeMetaToScalarType(kind.dtype()))) + " on " +
           kind.device().str();
  };
  const at::TensorOptions now = gradient.parameter.options();
  const std::string what = gradient.kind.type_equal(now)
                               ? " was converted and converted back after the model was wrapped, "
                                 "so this model no longer "
                                 "hears of its gradients"
                               : " was " + in_words(gradient.kind) +
                                     " when the model was wrapped, and is " + in_words(now) +
                                     " now";
  throw Error("rank " + std::to_string(rank) + ": " + gradient.name + what +
              "; convert and move models before they are wrapped, or call refresh() of the "
              "wrapped model on all ranks after it");
}

void raise_incomplete(int rank, const std::vector<Gradient>& gradients, uint64_t iteration,
                      uint64_t step, bool is_graph_static) {
  std::string names;
  size_t missing = 0;
  bool some_are_frozen = false;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].iteration == iteration) {
      continue;
    }
    some_are_frozen |= !gradients[i].parameter.requires_grad();
    if (++missing <= kNamesInMessages) {
      names += (missing > 1 ? ", " : "") + gradients[i].name + " (" + std::to_string(i) + ")";
    }
  }
  const std::string who = "rank " + std::to_string(rank) + ": ";
  if (missing == 0) {
    throw Error(who +
                "the backward before this forward ended with an error after all gradients "
                "were there; this rank cannot go on from here");
  }
  const std::string advice =
      some_are_frozen
          ? "Some no longer require grad: after freezing or unfreezing parameters, call refresh() "
            "of the wrapped model on all ranks"
      : is_graph_static
          ? "With static_graph=True every step must use the parameters that the first one used"
          : "If the model does not always use all parameters, pass find_unused_parameters=True";
  throw Error(who + std::to_string(missing) + " of " + std::to_string(gradients.size()) +
              " parameters did not receive grad in the backward of " + step_in_words(step) +
              ", so their buckets were not averaged: " + names +
              (missing > kNamesInMessages ? ", ..." : "") + ". " + advice +
              "; if backward was interrupted, this rank cannot go on from here");
}

void raise_too_late(int rank, const Gradient& gradient) {
  throw Error("rank " + std::to_string(rank) + ": gradient of " + gradient.name +
              " arrived when its bucket was on its way already. Use every "
              "parameter in one backward per forward, put the earlier backward under no_sync(), "
              "or pass schedule='sequential'");
}

}  // namespace dpcore
