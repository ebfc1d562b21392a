// What each rank says of itself with every step, in 64 bytes, and where the ranks differ: how many
// steps its optimizers have taken, a hash of their hyperparameters, a digest of a few cache lines
// of its parameters, and so on. dpcore/ddp/mistakes/ makes a sentence of a difference.
//
// The word travels with the first bucket of a step where the communicator carries words, as
// dpcore's own do: in memory that ranks read at that moment anyway. Others gather words by an
// all-reduce of their own in every 16th step. A hook that replaces the all-reduce has no words:
// what it does to gradients is the program's business.
//
// The digest is taken after an optimizer's step, when parameters are what will be trained; between
// two steps a program may change them for a moment on each rank alone (SAM). Each time it reads one
// cache line of about every tenth parameter, others the next time.
//
// Memory: a word per rank. Belongs to the thread of forward and backward. When a rank dies:
// gather() throws, like the wait for a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "reducer/bucket/bucket.h"
#include "reducer/bucket/bucket_communicator.h"

namespace dpcore {

// Of one line of each parameter, or of every so many of them: which ones depends on the label, of
// all for label 0. Never 0, unless there is none. Of memory of the host by itself, or by torch's
// operations with one copy from the device: the same number.
uint64_t digest_of_lines(const std::vector<Gradient>& gradients, uint64_t label);
uint64_t digest_on_device(const std::vector<Gradient>& gradients, uint64_t label);

class StepWords {
 public:
  struct Said {
    uint32_t step = 0;  // from 1 on
    uint32_t optimizer_steps = 0;
    uint32_t local_forwards = 0;  // without averaging, since the last step
    uint16_t unaveraged_steps = 0;
    uint8_t flags = 0;
    uint8_t knocks = 0;            // ranks that wait at this one's door to join
    uint64_t hyperparameters = 0;  // 0: no optimizer has stepped yet
    uint64_t modes = 0;            // train and eval, of a part of the modules
    uint64_t digest = 0;
    uint64_t samples = 0;
    uint64_t loads = 0;  // of weights or of an optimizer's state
    uint64_t data = 0;   // a few bytes of the input
  };
  static_assert(sizeof(Said) == sizeof(Word));
  enum Flag : uint8_t { has_no_inputs = 1, keeps_gradients = 2 };

  // In what ranks differ, or all agree though they should not.
  enum Finding : uint32_t {
    steps = 1,
    optimizer_steps = 2,
    local_forwards = 4,
    kept_gradients = 8,
    hyperparameters = 16,
    modes = 32,
    digest = 64,
    samples = 128,
    loads = 256,
    same_data = 512,
  };

  StepWords(bool is_on, std::shared_ptr<BucketCommunicator> communicator, at::Device device,
            const std::vector<Gradient>& gradients);

  // Of the next step. The program's side of the word, as Python sees it.
  Said own;

  // ---- gradients that no average has taken along
  void add_local_gradient(size_t i);
  // An average takes it along.
  void take_along(size_t i) {
    if (local_count_ > 0) {
      local_count_ -= local_[i];
      local_[i] = 0;
    }
  }
  bool has_local_gradients() const { return local_count_ > 0; }
  std::vector<size_t> local_gradients() const;
  // Whether the program has changed them since they came: a sample.
  bool has_edited_local_gradients() const;

  // ---- the life of a step
  // A training forward has ended; `step`: its number if its backward averages, else 0.
  void end_forward(uint64_t step, bool steps_under_forward);
  void end_forward_without_inputs();
  // The words that travel with the operation that is being launched, or none.
  std::shared_ptr<Words> leave_with(bool by_hook, uint64_t step);
  void optimizer_stepped(bool under_next_forward);
  // All buckets are averages. Returns Findings that were not there before.
  uint32_t finish(size_t slot, uint64_t layout, uint64_t step);
  // How many ranks wait to join: alike on all ranks when a step's buckets are averages.
  uint32_t knocks() const;
  // Those of all ranks, as finish() has compared them.
  const std::vector<Word>& all() const { return words_->all; }
  // Findings that need not be reported again.
  void set_known(uint32_t findings) { known_ = findings; }
  // Whether the program has changed a line that the last digest has read.
  bool has_changed_since_digest() const;

 private:
  static bool is_due(uint64_t step) { return step % 16 == 0; }
  void take_digest(uint64_t label);
  void gather(size_t slot, uint64_t layout);
  uint32_t compare();
  bool holds_gradients(uint64_t step) const;
  uint64_t line_of_gradient(size_t i) const;

  bool is_on_;
  bool is_on_host_;  // the parameters
  std::shared_ptr<BucketCommunicator> communicator_;
  const std::vector<Gradient>& gradients_;
  std::shared_ptr<Words> words_;
  std::vector<uint8_t> local_;  // gradients that came without averaging, since the last average
  size_t local_count_ = 0;
  size_t last_local_ = 0;
  uint64_t last_local_line_ = 0;
  uint64_t label_ = 0;  // of the last digest
  bool is_first_digest_ = true;
  bool is_digest_late_ = false;  // the parameters are updated under the next forward
  bool has_left_ = false;        // with an operation of this step
  bool is_sent_ = false;
  uint32_t known_ = 0;
  uint32_t same_data_in_a_row_ = 0;
  at::Tensor gathered_;  // a row per rank; made where communicators carry no words
};

}  // namespace dpcore
