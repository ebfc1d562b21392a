// A flight recorder like torch's: the last operations of this process, with sizes, types and times,
// for `torchfrtrace`.
//
// torch's own recorder is hidden inside its library, so the entries are kept here, in the form
// that dpcore/comm/launch/torch_backend.py writes out. A ring of TORCH_FR_BUFFER_SIZE entries
// (2000; 0 keeps none); an entry's memory is used again. All methods from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dpcore {

class FlightLog {
 public:
  using Ranks = std::shared_ptr<const std::vector<uint64_t>>;

  // Tensors as torch's recorder shows them. A list with one tensor per rank is one tensor there,
  // with a first dimension for the ranks; where its parts differ, the number of all elements.
  struct Shown {
    const std::vector<at::Tensor>& tensors;
    size_t list = 0;  // length of each of the lists that `tensors` holds in a row; 0: no lists
  };
  struct Shapes {
    std::vector<std::vector<int64_t>> sizes;
    std::vector<std::string> types;
    void assign(const Shown& shown);
  };
  struct Entry {
    uint64_t id = 0;
    uint64_t collective_id = 0;  // the same without messages
    std::string group;
    std::string description;
    Ranks ranks;              // the group's, numbered as in the job
    uint64_t collective = 0;  // number of the collective, or of the message, in its group
    uint64_t message = 0;
    uint64_t operation = 0;
    std::string name;  // "all_reduce", "send 0->1"
    Shapes inputs;
    Shapes outputs;
    int64_t created_ns = 0;
    int64_t completed_ns = 0;  // 0: it is not complete
    bool failed = false;
    int64_t timeout_ms = 0;
    bool is_message = false;
  };

  static FlightLog& of_process();

  // The number under which complete() finds it. `entry` gives what stands before the shapes.
  uint64_t add(Entry entry, const Shown& inputs, const Shown& outputs);
  void complete(uint64_t id, bool failed);
  // The oldest first.
  std::vector<Entry> entries();

 private:
  FlightLog();

  std::mutex mutex_;
  size_t capacity_;
  uint64_t next_ = 0;
  uint64_t next_collective_ = 0;
  std::vector<Entry> ring_;
};

}  // namespace dpcore
