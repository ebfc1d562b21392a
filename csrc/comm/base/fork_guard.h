// What a forked child (a DataLoader worker) inherits: nothing that could disturb its parent.
//
// An atfork handler runs in the child before fork() returns there. It remaps every arena of
// ours private in place, so that tensors keep their addresses and values while writes no longer
// reach the parent or its peers; drops the mappings of peers' arenas; closes our descriptors
// (a socket or memfd held open by a child would hide our death); and raises the generation, by
// which communicators know that they are copies and refuse to work.
//
// The registry is a fixed table behind a spin lock that the handlers take around fork, because
// malloc and mutexes may be unusable in the child.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace dpcore::fork_guard {

inline constexpr int kDropMapping = -1;

// How often this process image has been forked, counted along the line of its ancestors.
inline std::atomic<uint64_t> forks{0};
inline uint64_t generation() { return forks.load(std::memory_order_relaxed); }

// Member of what a forked child may inherit, and then has to leave alone: a thread that held a lock
// of it at the fork is not there to let go.
class Origin {
 public:
  bool is_forked_copy() const { return generation() != made_in_; }

 private:
  uint64_t made_in_ = generation();
};

// `offset`: of the mapping in the file that it shows.
void add_mapping(void* base, size_t bytes, int fd, size_t offset = 0);
void remove_mapping(void* base);
// Both for Descriptor. In a forked child, what is closed here is an empty one by then.
void add_descriptor(int fd);
void close_descriptor(int fd);

}  // namespace dpcore::fork_guard

namespace dpcore {

// Owns a file descriptor, which no forked child keeps: it must not hold a connection open, nor a
// memory alive, that its parent gives up. Moves, never copies.
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
