// Owns a file descriptor, and tells fork_guard of it: a forked child must not keep a connection
// open, nor a memory alive, that its parent gives up. Moves, never copies.
#pragma once

#include <fcntl.h>

#include <utility>

#include "comm/base/fork_guard.h"

namespace dpcore {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {
    if (fd_ >= 0) {
      fork_guard::add_descriptor(fd_);
    }
  }
  ~Descriptor() {
    if (fd_ >= 0) {
      fork_guard::close_descriptor(fd_);
    }
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    Descriptor taken(std::move(other));
    std::swap(fd_, taken.fd_);  // what it held before goes with `taken`
    return *this;
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A copy of one that has another owner; an empty one of -1.
inline Descriptor copy_of(int fd) {
  return Descriptor(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

}  // namespace dpcore
