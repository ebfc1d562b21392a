// A word on the host that the communication stream raises behind each operation, and that streams
// of the program wait for.
//
// Where processes share a GPU it takes turns between them. A process of which a stream waits for an
// event keeps its turn to the end, though it waits for a rank that needs one; a stream that waits
// for a flag gives the turn away (docs/decisions/0045).
//
// Memory: a page that is never given away while a stream may still look at it, since ending
// its registration waits for the device. Threads: raise() with the communicator's lock, wait() by
// any.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "cuda/device/device.h"

namespace dpcore {

class DoneFlag {
 public:
  explicit DoneFlag(Device& device) : device_(device) {
    void* page = std::aligned_alloc(kPageBytes, kPageBytes);
    if (page == nullptr) {
      throw std::bad_alloc();
    }
    page_.reset(page, std::free);
    new (page) uint32_t(0);
    mapped_ = device.map_host(page, kPageBytes);
  }

  // Into the stream, behind all that is there: the number that the flag has from then on.
  uint32_t raise(Device::Stream stream) {
    device_.raise_flag(stream, flag(), ++number_);
    return number_;
  }
  void wait(Device::Stream stream, uint32_t number) { device_.wait_flag(stream, flag(), number); }

 private:
  static constexpr size_t kPageBytes = 4096;

  uint32_t* flag() const { return static_cast<uint32_t*>(mapped_.on_device); }

  Device& device_;
  uint32_t number_ = 0;
  std::shared_ptr<void> page_;
  MappedPages mapped_;  // ends before the page
};

}  // namespace dpcore
