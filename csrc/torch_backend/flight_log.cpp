// See flight_log.h. Times are of the system's clock, as in torch's records.
#include "torch_backend/flight_log.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>

namespace dpcore {
namespace {

int64_t wall_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

size_t wanted_capacity() {
  for (const char* name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    if (const char* text = std::getenv(name)) {
      return std::strtoul(text, nullptr, 10);
    }
  }
  return 2000;
}

}  // namespace

void FlightLog::Shapes::assign(const Shown& shown) {
  const size_t each = std::max<size_t>(1, shown.list);
  sizes.resize(shown.tensors.size() / each);
  types.resize(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto first = shown.tensors.begin() + static_cast<ptrdiff_t>(i * each);
    const auto last = first + static_cast<ptrdiff_t>(each);
    const at::IntArrayRef shape = first->sizes();
    sizes[i].assign(shape.begin(), shape.end());
    types[i] = c10::toString(first->scalar_type());
    const auto alike = [&](const at::Tensor& tensor) { return tensor.sizes() == shape; };
    if (shown.list > 0 && std::all_of(first, last, alike)) {
      sizes[i].insert(sizes[i].begin(), static_cast<int64_t>(shown.list));
    } else if (shown.list > 0) {
      const auto add = [](int64_t n, const at::Tensor& tensor) { return n + tensor.numel(); };
      sizes[i].assign(1, std::accumulate(first, last, int64_t{0}, add));
    }
  }
}

FlightLog::FlightLog() : capacity_(wanted_capacity()) {}

FlightLog& FlightLog::of_process() {
  static auto* log = new FlightLog();  // operations may end while the process does
  return *log;
}

uint64_t FlightLog::add(Entry entry, const Shown& inputs, const Shown& outputs) {
  if (capacity_ == 0) {
    return 0;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t id = next_++;
  if (ring_.size() <= id % capacity_) {
    ring_.emplace_back();
  }
  Entry& slot = ring_[id % capacity_];
  entry.id = id;
  entry.collective_id = entry.is_message ? next_collective_ : next_collective_++;
  entry.inputs = std::move(slot.inputs);  // their memory is used again
  entry.outputs = std::move(slot.outputs);
  entry.inputs.assign(inputs);
  entry.outputs.assign(outputs);
  entry.created_ns = wall_clock_ns();
  slot = std::move(entry);
  return id;
}

void FlightLog::complete(uint64_t id, bool failed) {
  if (capacity_ == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& slot = ring_[id % capacity_];
  if (slot.id == id) {
    slot.completed_ns = wall_clock_ns();
    slot.failed = failed;
  }
}

std::vector<FlightLog::Entry> FlightLog::entries() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> ordered;
  const uint64_t first = next_ > ring_.size() ? next_ - ring_.size() : 0;
  for (uint64_t id = first; id < next_; ++id) {
    ordered.push_back(ring_[id % capacity_]);
  }
  return ordered;
}

}  // namespace dpcore
