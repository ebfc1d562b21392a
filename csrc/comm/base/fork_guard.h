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

#include <atomic>
#include <cstddef>
#include <cstdint>

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
void add_descriptor(int fd);
// Closes a descriptor that was added. In a forked child it is an empty one by then.
void close_descriptor(int fd);

}  // namespace dpcore::fork_guard
