// What the reducer says when something went wrong: which rank, which bucket, what to do.
#include "comm/base/error.h"
#include "reducer/reducer.h"

namespace dpcore {
namespace {

constexpr size_t kNamesInMessages = 8;

}  // namespace

// Autograd has made the parameter a new place to add gradients to, without our hook.
void Reducer::raise_changed(const Gradient& gradient) const {
  const auto in_words = [](const at::TensorOptions& kind) {
    return std::string(c10::toString(c10::typeMetaToScalarType(kind.dtype()))) + " on " +
           kind.device().str();
  };
  throw Error("rank " + std::to_string(communicator_->rank()) + ": " + gradient.name + " was " +
              in_words(gradient.kind) + " when the model was wrapped, and is " +
              in_words(gradient.parameter.options()) +
              " now; convert and move models before they are wrapped, or call refresh() of the "
              "wrapped model on all ranks after it");
}

std::string Reducer::step_in_words() const { return "step " + std::to_string(completed_ + 1); }

void Reducer::raise_incomplete() const {
  std::string names;
  size_t missing = 0;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].iteration != iteration_ && ++missing <= kNamesInMessages) {
      names += (missing > 1 ? ", " : "") + gradients_[i].name + " (" + std::to_string(i) + ")";
    }
  }
  const std::string rank = "rank " + std::to_string(communicator_->rank()) + ": ";
  if (missing == 0) {
    throw Error(rank +
                "the backward before this forward ended with an error after all gradients "
                "were there; this rank cannot go on from here");
  }
  const std::string advice =
      static_graph_
          ? "With static_graph=True every step must use the parameters that the first one used"
          : "If the model does not always use all parameters, pass find_unused_parameters=True";
  throw Error(rank + std::to_string(missing) + " of " + std::to_string(gradients_.size()) +
              " parameters did not receive grad in the backward of " + step_in_words() +
              ", so their buckets were not averaged: " + names +
              (missing > kNamesInMessages ? ", ..." : "") + ". " + advice +
              "; if backward was interrupted, this rank cannot go on from here");
}

void Reducer::refuse_tracing() {
  try {
    throw Unsupported(
        "compiled autograd traces backward before it runs, and DataParallel's hooks in C++ act "
        "while it runs. Switch it off: torch._dynamo.config.compiled_autograd = False; "
        "torch.compile of the forward needs no switch");
  } catch (...) {
    callbacks_.raise();
  }
}

void Reducer::raise_too_late(size_t i) const {
  throw Error("rank " + std::to_string(communicator_->rank()) + ": gradient of " +
              gradients_[i].name +
              " arrived when its bucket was on its way already. Use every "
              "parameter in one backward per forward, put the earlier backward under no_sync(), "
              "or pass schedule='sequential'");
}

void Reducer::raise_with_bucket(size_t b) { raise_about(describe(b, buckets_[b], gradients_)); }

// Of the parameters, when a gather of them has failed.
std::string Reducer::which_are_new() const {
  std::string old;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!legs_.is_over(b)) {
      old += (old.empty() ? "" : ", ") + std::to_string(b);
    }
  }
  return ". The parameters of this rank lie between step " + std::to_string(completed_) +
         " and step " + std::to_string(completed_ + 1) + ": buckets " + old +
         " are not whole, the others are new. Go on from a checkpoint";
}

void Reducer::raise_about(const std::string& what, const std::string& after) {
  const std::string where = what + " of " + settings_.model + ", " + step_in_words() + ": ";
  try {
    throw;
  } catch (const Error& problem) {
    const bool differs = problem.kind() == ErrorKind::mismatch;
    try {
      throw_as(problem.kind(), where + problem.what() + (differs ? settings_.advice : after));
    } catch (const Error&) {
      if (!first_failure_) {
        first_failure_ = std::current_exception();
      }
      throw;
    }
  }
}

}  // namespace dpcore
