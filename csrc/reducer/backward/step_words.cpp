// What a word says of gradients and parameters, its way to the other ranks where no bucket takes it
// along, and the comparison.
#include "reducer/backward/step_words.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

namespace dpcore {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kLinesPerDigest = 40;  // about, as long as that is at least each tenth parameter
constexpr size_t kMostParametersPerLine = 10;
constexpr size_t kPieces = sizeof(Word) / sizeof(uint32_t);
constexpr uint32_t kSameDataInARow = 4;

// Which parameters a digest reads, and which line of each: others with each label.
size_t parameters_per_line(size_t parameters, uint64_t label) {
  return label == 0 ? 1
                    : std::clamp((parameters + kLinesPerDigest - 1) / kLinesPerDigest, size_t{1},
                                 kMostParametersPerLine);
}

size_t line_of(size_t lines, uint64_t visit) {
  const uint64_t part = visit * 0x9e3779b97f4a7c15ull >> 32;  // of 2^32, each time another one
  return part * lines >> 32;
}

// Whether its elements lie side by side in memory, that of the host or of a device.
bool is_in_one_piece(const at::Tensor& parameter) {
  const c10::TensorImpl& tensor = *parameter.unsafeGetTensorImpl();
  if (!tensor.has_storage() || tensor.has_symbolic_sizes_strides() ||
      !tensor.is_non_overlapping_and_dense()) {
    return false;
  }
  c10::StorageImpl& storage = *tensor.unsafe_storage().unsafeGetStorageImpl();
  const auto elements = static_cast<size_t>(tensor.storage_offset() + tensor.numel());
  return storage._mutable_data_ptr_no_checks().get() != nullptr &&
         storage.nbytes() >= elements * tensor.itemsize();
}

// The memory of a parameter on the CPU whose elements lie together, else nothing.
std::pair<const std::byte*, size_t> memory_of(const at::Tensor& parameter) {
  if (!parameter.is_cpu() || !is_in_one_piece(parameter)) {
    return {nullptr, 0};
  }
  const c10::TensorImpl& tensor = *parameter.unsafeGetTensorImpl();
  const size_t size = tensor.itemsize();
  const auto* begin = static_cast<const std::byte*>(
      tensor.unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  return {begin + static_cast<size_t>(tensor.storage_offset()) * size,
          static_cast<size_t>(tensor.numel()) * size};
}

// The words are mixed side by side, so that a processor need not wait for one before the next.
uint64_t hash_line(uint64_t hash, const std::byte* at, size_t bytes) {
  uint64_t words[kLine / sizeof(uint64_t)] = {};
  std::memcpy(words, at, bytes);
  uint64_t factor = 0x9e3779b97f4a7c15ull;  // odd, and another one for each word
  for (const uint64_t word : words) {
    hash += (word ^ word >> 32) * factor;
    factor += 0x632be59bd9b4e01aull;
  }
  hash *= 0xff51afd7ed558ccdull;
  return hash ^ hash >> 29;
}

}  // namespace

StepWords::StepWords(bool is_on, std::shared_ptr<BucketCommunicator> communicator,
                     at::Device device, const std::vector<Gradient>& gradients)
    : is_on_(is_on && communicator->world() > 1),
      is_on_host_(device.is_cpu()),
      communicator_(std::move(communicator)),
      gradients_(gradients),
      words_(std::make_shared<Words>()),
      local_(gradients.size()) {
  if (!is_on_) {
    return;
  }
  words_->all.resize(static_cast<size_t>(communicator_->world()));
  if (!communicator_->carries_words()) {
    gathered_ = communicator_->allocate(words_->all.size() * kPieces, at::kDouble, device);
  }
}

std::vector<size_t> StepWords::local_gradients() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < local_.size(); ++i) {
    if (local_[i] != 0) {
      found.push_back(i);
    }
  }
  return found;
}

void StepWords::end_forward(uint64_t step, bool steps_under_forward) {
  if (!is_on_) {
    return;
  }
  if (is_first_digest_) {
    is_first_digest_ = false;
    take_digest(0);
  } else if (is_digest_late_ || (step > 2 && own.optimizer_steps == 0 && !steps_under_forward)) {
    is_digest_late_ = false;
    take_digest(own.optimizer_steps == 0 ? step : own.optimizer_steps);
  }
  if (step == 0) {
    ++own.local_forwards;
    return;
  }
  has_left_ = is_sent_ = false;
  own.flags = holds_gradients(step) ? keeps_gradients : 0;
}

void StepWords::end_forward_without_inputs() {
  has_left_ = is_sent_ = false;
  own.flags = has_no_inputs;
}

// Whether the average of the step before is still in one of the parameters' gradients: a sample.
bool StepWords::holds_gradients(uint64_t step) const {
  if (gradients_.empty() || own.local_forwards > 0 || step == 1) {
    return false;
  }
  const at::Tensor& grad = gradients_[step % gradients_.size()].parameter.grad();
  if (!grad.defined()) {
    return false;
  }
  const auto [at, bytes] = memory_of(grad);
  return at != nullptr && std::any_of(at, at + std::min(bytes, kLine),
                                      [](std::byte byte) { return byte != std::byte{0}; });
}

std::shared_ptr<Words> StepWords::leave_with(bool by_hook, uint64_t step) {
  if (!is_on_ || has_left_ || by_hook) {
    return nullptr;
  }
  has_left_ = true;
  own.step = static_cast<uint32_t>(step);
  words_->own = std::bit_cast<Word>(own);
  if (!communicator_->carries_words()) {
    return nullptr;
  }
  is_sent_ = true;
  return words_;
}

// The gradient has just been added to `parameter.grad`. What the program does to the last one of
// these before it is used shows whether it averages them itself.
void StepWords::add_local_gradient(size_t i) {
  if (!is_on_) {
    return;
  }
  local_count_ += local_[i] == 0 ? 1 : 0;
  local_[i] = 1;
  last_local_ = i;
  last_local_line_ = line_of_gradient(i);
}

bool StepWords::has_edited_local_gradients() const {
  return local_count_ > 0 && line_of_gradient(last_local_) != last_local_line_;
}

uint64_t StepWords::line_of_gradient(size_t i) const {
  const at::Tensor& grad = gradients_[i].parameter.grad();
  const auto [at, bytes] = grad.defined() ? memory_of(grad) : std::pair<const std::byte*, size_t>();
  return at == nullptr ? 0 : hash_line(1, at, std::min(kLine, bytes));
}

void StepWords::optimizer_stepped(bool under_next_forward) {
  if (!is_on_) {
    return;
  }
  ++own.optimizer_steps;
  is_digest_late_ = under_next_forward;
  if (!under_next_forward) {
    take_digest(own.optimizer_steps);
  }
}

uint32_t StepWords::finish(size_t slot, uint64_t layout, uint64_t step) {
  if (!is_on_ || !has_left_) {
    return 0;
  }
  has_left_ = false;
  if (!std::exchange(is_sent_, false)) {
    if (!is_due(step)) {
      return 0;
    }
    gather(slot, layout);
  }
  own.local_forwards = 0;
  const uint32_t found = compare();
  if ((found & (steps | optimizer_steps | digest)) == 0) {
    own.unaveraged_steps = 0;  // the parameters are equal again
  }
  return (found & ~known_) != 0 ? found : 0;
}

uint32_t StepWords::knocks() const {
  uint32_t sum = 0;
  for (const Word& word : words_->all) {
    sum += std::bit_cast<Said>(word).knocks;
  }
  return sum;
}

uint32_t StepWords::compare() {
  Said first;
  bool has_first = false;
  bool is_same = true;
  uint32_t found = 0;
  for (const Word& word : words_->all) {
    const auto said = std::bit_cast<Said>(word);
    if (said.step == 0) {
      return 0;  // a rank that looks for nothing
    }
    if ((said.flags & has_no_inputs) != 0) {
      continue;
    }
    if (!has_first) {
      first = said;
      has_first = true;
      continue;
    }
    const auto add = [&found](bool differs, uint32_t finding) { found |= differs ? finding : 0; };
    const auto differ = [](uint64_t one, uint64_t other) {  // of which 0 says nothing
      return one != other && one != 0 && other != 0;
    };
    add(said.step != first.step, steps);
    add(said.optimizer_steps != first.optimizer_steps, optimizer_steps);
    add(said.local_forwards != first.local_forwards, local_forwards);
    add(((said.flags ^ first.flags) & keeps_gradients) != 0, kept_gradients);
    add(differ(said.hyperparameters, first.hyperparameters), hyperparameters);
    add(said.modes != first.modes, modes);
    add(differ(said.digest, first.digest), digest);
    add(said.samples != first.samples, samples);
    add(said.loads != first.loads, loads);
    is_same = is_same && said.data == first.data && said.data != 0;
  }
  same_data_in_a_row_ = is_same && has_first ? same_data_in_a_row_ + 1 : 0;
  if (same_data_in_a_row_ >= kSameDataInARow) {
    found |= same_data;
  }
  return found;
}

// Each rank fills its row, with whole numbers of 32 bits; the mean over the ranks, which is all
// that some communicators know, times their number has every row.
void StepWords::gather(size_t slot, uint64_t layout) {
  const at::NoGradGuard no_grad;
  const auto world = static_cast<size_t>(communicator_->world());
  const at::Tensor here = at::zeros({static_cast<int64_t>(world * kPieces)}, at::kDouble);
  auto* pieces = here.mutable_data_ptr<double>();
  const auto own = std::bit_cast<std::array<uint32_t, kPieces>>(words_->own);
  std::copy(own.begin(), own.end(), pieces + communicator_->rank() * kPieces);
  gathered_.copy_(here);
  communicator_->start(slot, gathered_,
                       {.op = ReduceOp::mean,
                        .priority = BucketCall::kUrgent,
                        .layout = layout,
                        .background = false});
  communicator_->wait(slot);
  here.copy_(gathered_);
  for (size_t r = 0; r < world; ++r) {
    std::array<uint32_t, kPieces> row;
    for (size_t i = 0; i < kPieces; ++i) {
      row[i] = static_cast<uint32_t>(std::llround(pieces[r * kPieces + i] * world));
    }
    words_->all[r] = std::bit_cast<Word>(row);
  }
}

// ---- digests ---------------------------------------------------------------------------------

void StepWords::take_digest(uint64_t label) {
  label_ = label;
  if (is_on_host_) {
    own.digest = digest_of_lines(gradients_, label);
  } else {
    const bool is_wanted = is_due(own.step + 1) || is_due(own.step + 2);
    own.digest = is_wanted ? digest_on_device(gradients_, label) : 0;
  }
}

bool StepWords::has_changed_since_digest() const {
  return is_on_ && is_on_host_ && !is_digest_late_ &&
         digest_of_lines(gradients_, label_) != own.digest;
}

uint64_t digest_of_lines(const std::vector<Gradient>& gradients, uint64_t label) {
  const size_t stride = parameters_per_line(gradients.size(), label);
  const uint64_t visit = label / stride;
  const auto place_of = [&](size_t i) {
    const auto [at, bytes] = memory_of(gradients[i].parameter);
    const size_t begin = line_of((bytes + kLine - 1) / kLine, visit) * kLine;
    return std::pair(at == nullptr ? nullptr : at + begin, std::min(kLine, bytes - begin));
  };
  constexpr size_t kAhead = 16;
  std::pair<const std::byte*, size_t> ahead[kAhead];
  uint64_t hash = label + 1;
  for (size_t i = label % stride; i < gradients.size();) {
    size_t count = 0;
    for (; count < kAhead && i < gradients.size(); ++count, i += stride) {
      ahead[count] = place_of(i);
      __builtin_prefetch(ahead[count].first);
    }
    for (size_t a = 0; a < count; ++a) {
      if (ahead[a].first != nullptr && ahead[a].second > 0) {
        hash = hash_line(hash, ahead[a].first, ahead[a].second);
      }
    }
  }
  return hash | 1;
}

uint64_t digest_on_device(const std::vector<Gradient>& gradients, uint64_t label) {
  const at::NoGradGuard no_grad;
  const size_t stride = parameters_per_line(gradients.size(), label);
  const uint64_t visit = label / stride;
  std::vector<at::Tensor> lines;
  std::vector<size_t> sizes;
  for (size_t i = label % stride; i < gradients.size(); i += stride) {
    const at::Tensor& parameter = gradients[i].parameter;
    if (!is_in_one_piece(parameter) || parameter.numel() == 0) {
      continue;
    }
    const auto width = static_cast<int64_t>(kLine / parameter.element_size());
    const auto count = static_cast<size_t>((parameter.numel() + width - 1) / width);
    const int64_t begin = static_cast<int64_t>(line_of(count, visit)) * width;
    const int64_t elements = std::min(width, parameter.numel() - begin);
    const at::Tensor line =
        parameter.detach().as_strided({elements}, {1}, parameter.storage_offset() + begin);
    lines.push_back((line.is_complex() ? at::view_as_real(line).reshape(-1) : line)
                        .contiguous()
                        .view(at::kByte));
    sizes.push_back(lines.back().nbytes());
  }
  if (lines.empty()) {
    return 0;
  }
  const at::Tensor here = at::cat(lines).cpu();
  const auto* bytes = static_cast<const std::byte*>(here.const_data_ptr());
  uint64_t hash = label + 1;
  for (const size_t size : sizes) {
    hash = hash_line(hash, bytes, size);
    bytes += size;
  }
  return hash | 1;
}

}  // namespace dpcore
