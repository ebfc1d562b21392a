// The memory that ranks of a host share beside their data, and the bell by which they wake each
// other: which operation a rank has entered, how far it is, why it gave up, and what it did last.
// It lies in each rank's own arena and is written by that rank alone (two exceptions: the
// receiver's side of a mailbox, and the count of the ranks that departed); peers read.
//
// Every field that another process reads is an atomic or is published by one: the writer fills
// the plain fields, then stores the atomic with release; readers load it with acquire.
// Nothing here has a constructor that runs in shared memory: fresh arena pages are zero, and
// zero is the start state of every field.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/base/error.h"
#include "comm/base/word.h"
#include "comm/memory/ballot.h"
#include "comm/reduce/not_finite.h"

namespace dpcore {

// ---- the doorbell
//
// How one rank wakes another: a futex word in shared memory, rung only when a thread sleeps on it.
//
// Sleeper: announce (asleep + 1), look once more whether there is work, sleep, withdraw.
// Ringer:  publish the work, fence, look at asleep, ring.
// The two fences make it impossible that the sleeper misses the work and the ringer misses the
// sleeper. All threads of an endpoint sleep on the endpoint's own bell.

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) {
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> asleep{0};
  // Where its owner last began an operation or waited. Seldom written, so that threads that ring
  // keep this line in their caches.
  std::atomic<int32_t> processor{-1};

  void record_processor(int32_t now) {
    if (processor.load(std::memory_order_relaxed) != now) {
      processor.store(now, std::memory_order_relaxed);
    }
  }

  void ring() {
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(rings);
  }

  // To be asked after publishing with release stores and fence_before_poll().
  bool has_sleeper() {
#if defined(__SANITIZE_THREAD__)
    // The thread sanitizer does not know fences; a read-modify-write says the same.
    return asleep.fetch_add(0, std::memory_order_seq_cst) != 0;
#else
    return asleep.load(std::memory_order_relaxed) != 0;
#endif
  }

  static void fence_before_poll() {
#if !defined(__SANITIZE_THREAD__)
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }

  uint32_t announce_sleep() {
    asleep.fetch_add(1, std::memory_order_seq_cst);
    return rings.load(std::memory_order_seq_cst);
  }
  void withdraw() { asleep.fetch_sub(1, std::memory_order_relaxed); }
};

// ---- the control block

inline constexpr uint64_t kControlMagic = 0x31'65'72'6f'63'70'64ull;  // "dpcore1"
inline constexpr uint32_t kLayoutVersion = 12;
// Operations of one communicator in flight: as many as a model of many small buckets has, with room
// for an urgent one that comes past them.
inline constexpr int kSlots = 64;
// A slot is used again only two rounds later: a rank that only gave compares with it afterwards,
// and by then the others may have kSlots further operations in flight.
inline constexpr int kSlotsKept = 2 * kSlots;
// Operations kept in the black box: those in flight, and as many finished ones.
inline constexpr int kHistory = 2 * kSlots;
inline constexpr int kReasonBytes = 1024;
inline constexpr int kPlacementBytes = 240;
inline constexpr int kStages = 4;  // memory that ordinary buffers are copied through
inline constexpr size_t kStageBytes = size_t{512} << 10;

// What every rank must agree on before a byte of user memory is written.
struct Fingerprint {
  uint8_t collective = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t path = 0;  // a path asked for by the caller
  int32_t root = 0;
  uint64_t count = 0;      // elements, in the collective's own terms
  uint64_t layout = 0;     // hash of uneven sizes, or of a gradient bucket's parameters
  uint64_t algorithm = 0;  // hash of the schedule, 0 for the automatic choice
  bool operator==(const Fingerprint&) const = default;
};

inline constexpr size_t kTinyBytes = 24;

// One operation of one rank. `posted` and `finished` only ever grow; the other counters start
// again with each operation, before `posted` says so.
//
// What an operation costs at least is the way of a cache line from one processor to another, so
// fields that are read together lie together: the first line is all that peers read of a tiny
// operation (but for the factor of premul_sum). The processor fetches lines in pairs, so the second
// one is written before `posted`, where it is written at all. The counters lie apart from both:
// writing them must not wait for the ranks that read the entry.
struct alignas(128) OperationSlot {
  std::atomic<uint64_t> posted;  // number + 1 of the operation the fields describe
  Fingerprint fingerprint;
  alignas(8) std::byte tiny[kTinyBytes];  // the data, if there is no more of it

  uint64_t input_offset;   // in this rank's arena, or Arena::kNowhere
  uint64_t input_address;  // in this rank's process (peer_memory.h); kNowhere: not to be read
  uint64_t output_offset;
  uint64_t stage_offset;
  double prescale;
  // Hash of the arguments of an operation in the order of a stream, which peers compare without
  // waiting for each other (cuda/stream/stream_watch.h). 0: there was none in this slot.
  std::atomic<uint64_t> arguments;

  alignas(128) std::atomic<uint64_t> filled;  // chunks of the stage that peers may read
  std::atomic<uint64_t> reduced;              // chunks whose own slice is reduced in all stages
  std::atomic<uint64_t> consumed;             // chunks this rank has read from all its peers
  std::atomic<uint64_t> finished;  // number + 1: no more touching of peers' memory for it
  NotFinite not_finite;            // of what this rank has added; in the line of `finished`

  alignas(64) Word word;  // written before `posted`, of an operation that has one
};
static_assert(offsetof(OperationSlot, input_offset) == 64);
static_assert(offsetof(OperationSlot, arguments) < 128, "beside what is written at the post");
static_assert(offsetof(OperationSlot, filled) == 128 && sizeof(OperationSlot) == 256);
static_assert(offsetof(OperationSlot, not_finite) + sizeof(NotFinite) <= 192);

// What went wrong, alike in a rank's own memory, in its control block and in frames.
struct FailureRecord {
  ErrorKind kind = ErrorKind::none;
  int32_t culprit = -1;   // rank in the communicator, -1 when no single rank is to blame
  int32_t reporter = -1;  // the rank that found it; `reason` is in its words
  uint32_t unused = 0;
  int64_t when_ns = 0;     // in a frame, its age: clocks of two hosts have nothing in common
  uint64_t operation = 0;  // number + 1 of the collective that failed, 0: none of them
  char reason[kReasonBytes] = {};
};

// Why a rank gave up. Written once; `state` publishes it.
struct AbortRecord {
  // A rank whose other group failed leaves this one, which has not failed for the ranks that need
  // nothing more of that rank.
  enum State : uint32_t { none, why_it_left, why_it_failed };
  std::atomic<uint32_t> state;
  FailureRecord failure;

  void publish(State how, const FailureRecord& why) {
    failure = why;
    state.store(how, std::memory_order_release);
  }
};

struct HistoryEntry {
  std::atomic<uint64_t> number;  // number + 1, written last
  Fingerprint fingerprint;
  uint64_t bytes;
  int64_t begin_ns;
  std::atomic<int64_t> end_ns;  // 0 while it runs
};

// A send or recv that a rank has been waiting in for a while, as it last looked up from the wait.
struct MessageWait {
  std::atomic<int64_t> seen_ns;  // 0: there was none yet; written last
  std::atomic<int64_t> since_ns;
  std::atomic<uint64_t> tag;
  std::atomic<uint64_t> bytes;
  std::atomic<int32_t> peer;  // -1: from any rank
  std::atomic<uint32_t> sends;

  void show(bool sends_it, int whom, uint64_t its_tag, uint64_t its_bytes, int64_t since,
            int64_t now) {
    since_ns.store(since, std::memory_order_relaxed);
    tag.store(its_tag, std::memory_order_relaxed);
    bytes.store(its_bytes, std::memory_order_relaxed);
    peer.store(whom, std::memory_order_relaxed);
    sends.store(sends_it ? 1 : 0, std::memory_order_relaxed);
    seen_ns.store(now, std::memory_order_release);
  }
};

// Where the program of a rank is, for `dpcore inspect` while it hangs. Written about once a second,
// by a thread beside the program, and not while the process is stopped. `changes` is odd
// while the text is being replaced: a reader that finds it odd, or another number afterwards, reads
// again.
struct Placement {
  std::atomic<uint64_t> changes;
  std::atomic<int64_t> seen_ns;      // 0: not recorded yet
  std::atomic<int64_t> since_ns;     // it is there since
  std::atomic<uint64_t> operations;  // that the rank had entered by then
  char text[kPlacementBytes];
};

// By one thread at a time.
inline void record_placement(Placement& placement, const char* text, int64_t since_ns,
                             uint64_t operations, int64_t now) {
  placement.changes.fetch_add(1, std::memory_order_acq_rel);
  const size_t length = strnlen(text, sizeof(placement.text) - 1);
  std::memcpy(placement.text, text, length);
  placement.text[length] = '\0';
  placement.since_ns.store(since_ns, std::memory_order_relaxed);
  placement.operations.store(operations, std::memory_order_relaxed);
  placement.seen_ns.store(now, std::memory_order_relaxed);
  placement.changes.fetch_add(1, std::memory_order_release);
}

// One per communicator and rank. Mailbox descriptors for `world` peers follow it in memory.
struct alignas(64) ControlBlock {
  uint64_t magic;
  uint32_t version;
  int32_t rank;
  int32_t world;
  int32_t member;              // the rank's number in the communicator of init()
  uint64_t job;                // the same for the ranks that met in one init(), and for no others
  uint64_t group;              // names the communicator within the job, see Context
  std::atomic<uint32_t> left;  // finalized: no operation will follow
  std::atomic<uint32_t> departed;         // peers that will not look here again; they count
  std::atomic<uint64_t> operations_seen;  // operations this rank has entered
  std::atomic<int64_t> alive_ns;          // when this rank last looked up from a wait
  // All operations with smaller numbers are finished here. On a line that nothing else makes the
  // peers give back.
  alignas(64) std::atomic<uint64_t> over_below;
  alignas(64) AbortRecord abort;
  BallotBox ballots;
  MessageWait message;
  Placement placement;
  OperationSlot slots[kSlotsKept];
  HistoryEntry history[kHistory];

  OperationSlot& slot(uint64_t number) { return slots[number % kSlotsKept]; }

  // Of zeroed memory; before peers may look.
  void prepare(int of_rank, int of_world, int of_member, uint64_t in_job, uint64_t in_group) {
    magic = kControlMagic;
    version = kLayoutVersion;
    rank = of_rank;
    world = of_world;
    member = of_member;
    job = in_job;
    group = in_group;
  }

  void record_entered(uint64_t number, const Fingerprint& what, uint64_t bytes, int64_t now) {
    HistoryEntry& entry = history[number % kHistory];
    entry.number.store(0, std::memory_order_relaxed);
    entry.fingerprint = what;
    entry.bytes = bytes;
    entry.begin_ns = now;
    entry.end_ns.store(0, std::memory_order_relaxed);
    entry.number.store(number + 1, std::memory_order_release);
    operations_seen.store(number + 1, std::memory_order_release);
  }

  // Operations may finish in another order than they began.
  void record_finished(uint64_t number) {
    slot(number).finished.store(number + 1, std::memory_order_release);
    uint64_t over = over_below.load(std::memory_order_relaxed);
    while (slot(over).finished.load(std::memory_order_relaxed) > over) {
      ++over;
    }
    over_below.store(over, std::memory_order_release);
  }
};

// At offset 0 of what a process keeps of the ranks of other hosts (group/remote_members.h). A
// control block per rank follows, `stride` bytes apart.
struct alignas(64) MirrorHeader {
  uint64_t magic;
  uint32_t version;
  int32_t process;
  uint64_t first;
  uint64_t stride;
};

// Where the segments of an arena end, in its file (arena.h). A peer maps a segment when it first
// meets an offset in it, so `count` is stored before such an offset is told to any peer.
inline constexpr uint32_t kMostSegments = 48;
struct SegmentTable {
  std::atomic<uint32_t> count;
  uint64_t ends[kMostSegments];
};

// At offset 0 of every arena.
struct alignas(64) ArenaHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;
  int32_t process;
  uint64_t root_control_offset;  // control block of the communicator made by init()
  uint64_t address;              // of this header in its owner's process
  uint64_t token;                // random: a peer that finds it there reads the right process
  Doorbell bell;
  SegmentTable segments;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace dpcore
