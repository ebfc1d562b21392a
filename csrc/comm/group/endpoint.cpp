// Construction order matters: the header and the first control block are in place before the
// meeting, so a peer that maps the arena finds them.
#include "comm/group/endpoint.h"

#include <poll.h>
#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "comm/base/error.h"
#include "comm/base/fault.h"
#include "comm/base/fork_guard.h"

namespace dpcore {
namespace {

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

std::shared_ptr<Endpoint> Endpoint::meet(Meeting how, const MeetingPlace& place,
                                         const TcpPlace* tcp, size_t control_bytes,
                                         const std::function<void(std::byte*)>& prepare_control) {
  std::shared_ptr<Endpoint> self(new Endpoint);
  self->rank_ = place.rank;
  self->fork_generation_ = fork_guard::generation();
  self->shares_process_ = how == Meeting::threads;
  self->oversubscribed_ = place.world > usable_processors();
  self->arena_ = Arena::create(place.rank);
  self->header_block_ = self->arena_->allocate(sizeof(ArenaHeader), 64);
  if (self->header_block_.get() != self->arena_->base()) {
    throw Error("internal: the arena's header is not at its start");
  }
  self->control_block_ = self->arena_->allocate(control_bytes, 64);
  prepare_control(self->control_block_.get());

  auto* header = reinterpret_cast<ArenaHeader*>(self->header_block_.get());
  header->magic = kControlMagic;
  header->version = kLayoutVersion;
  header->header_bytes = sizeof(ArenaHeader);
  header->process = getpid();
  header->root_control_offset =
      static_cast<uint64_t>(self->control_block_.get() - self->arena_->base());
  header->address = reinterpret_cast<uint64_t>(header);
  if (getrandom(&header->token, sizeof(header->token), 0) != sizeof(header->token)) {
    header->token = 0;  // then nobody reads this rank's memory
  }

  fault::reach(fault::Place::init, place.rank, 0);
  std::vector<Presence> present;
  if (place.world == 1) {
    present.resize(1);
  } else if (tcp != nullptr) {
    self->connect(how, place, *tcp, present);
  } else {
    present = how == Meeting::threads ? meet_inproc(place, self->arena_)
                                      : meet_unix(place, *self->arena_);
  }
  self->costs_ = place.world == 1 ? place.costs : present[0].costs;
  if (self->neighbours_.empty()) {
    self->neighbours_ = std::vector<Neighbour>(place.world);
  }
  try {
    for (int r = 0; r < place.world; ++r) {
      self->take_in(r, present[r]);
    }
  } catch (...) {  // no addresses left, say
    std::for_each(present.begin(), present.end(), close_all);
    throw;
  }
  self->reads_mates_ = self->try_to_read_mates();
  return self;
}

// Threads of one process go by the stage, like processes that may not read each other.
bool Endpoint::try_to_read_mates() {
  const char* wanted = std::getenv("DPCORE_READ_PEERS");
  if (shares_process_ || (wanted != nullptr && std::string_view(wanted) == "0")) {
    return false;
  }
  for (int r = 0; r < world(); ++r) {
    if (r == rank_ || is_remote(r)) {
      continue;
    }
    const auto& header = *reinterpret_cast<const ArenaHeader*>(neighbours_[r].base);
    neighbours_[r].readable = {process_of(r), header.address + offsetof(ArenaHeader, token),
                               header.token};
    if (!can_read(neighbours_[r].readable)) {
      return false;
    }
  }
  return true;
}

void Endpoint::connect(Meeting how, const MeetingPlace& place, const TcpPlace& tcp,
                       std::vector<Presence>& present) {
  Descriptor wake_event = Network::make_wake_event();
  std::vector<TcpPresence> peers = meet_tcp(place, tcp, [&](const MeetingPlace& mates) {
    return how == Meeting::threads ? meet_inproc(mates, arena_, wake_event.get())
                                   : meet_unix(mates, *arena_, wake_event.get());
  });
  const auto machine_of = [](const std::string& address) {
    return address.substr(0, address.rfind(':'));
  };
  present.resize(peers.size());
  neighbours_ = std::vector<Neighbour>(peers.size());
  int on_this_machine = 0;
  bool needs_network = false;
  for (size_t r = 0; r < peers.size(); ++r) {
    present[r] = std::exchange(peers[r].memory, {});
    present[r].process = peers[r].process;
    present[r].costs = peers[r].costs;
    neighbours_[r].host = peers[r].host;
    needs_network |= peers[r].is_remote();
    // Ranks that do not share memory here may share processors all the same.
    on_this_machine += machine_of(peers[r].address) == machine_of(peers[rank_].address) ? 1 : 0;
  }
  oversubscribed_ = on_this_machine > usable_processors();
  if (needs_network) {
    std::vector<TcpPeer> connected(std::make_move_iterator(peers.begin()),
                                   std::make_move_iterator(peers.end()));
    network_ = std::make_unique<Network>(rank_, std::move(connected), std::move(wake_event));
  }
}

// What is taken over is removed from `present`.
void Endpoint::take_in(int r, Presence& present) {
  Neighbour& neighbour = neighbours_[r];
  neighbour.process = r == rank_ ? getpid() : present.process;
  neighbour.wake_event = Descriptor(std::exchange(present.wake_event, -1));
  if (r == rank_) {
    neighbour.view = ArenaView::of(arena_);
  } else if (present.local) {
    neighbour.view = ArenaView::of(present.local);
  } else if (present.memfd >= 0) {
    neighbour.pidfd = Descriptor(std::exchange(present.pidfd, -1));
    neighbour.view = ArenaView::map(std::exchange(present.memfd, -1), present.reserve);
  } else {  // remote
    neighbour.bell = &bell_of_remote_;
    return;
  }
  neighbour.base = neighbour.view->base();
  neighbour.bell = &reinterpret_cast<ArenaHeader*>(neighbour.base)->bell;
}

uint64_t Endpoint::root_control_offset_of(int r) const {
  if (is_remote(r)) {
    return 0;
  }
  return reinterpret_cast<const ArenaHeader*>(neighbours_[r].base)->root_control_offset;
}

void Endpoint::look_for_deaths() {
  constexpr int kBatch = 64;
  pollfd entries[kBatch];
  int ranks[kBatch];
  int filled = 0;
  const auto ask = [&] {
    if (filled > 0 && poll(entries, filled, 0) > 0) {
      for (int i = 0; i < filled; ++i) {
        if (entries[i].revents != 0) {
          neighbours_[ranks[i]].dead.store(true, std::memory_order_release);
        }
      }
    }
    filled = 0;
  };
  for (int r = 0; r < world(); ++r) {
    if (neighbours_[r].pidfd && !dead(r)) {
      entries[filled] = {neighbours_[r].pidfd.get(), POLLIN, 0};
      ranks[filled] = r;
      if (++filled == kBatch) {
        ask();
      }
    }
  }
  ask();
  for (int r = 0; r < world(); ++r) {
    if (is_remote(r) && network_->is_lost(r)) {
      neighbours_[r].dead.store(true, std::memory_order_release);
    }
  }
}

void Endpoint::note_failure(const FirstFailure& failure) {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!first_failure_) {
    first_failure_ = failure;
  }
}

std::optional<FirstFailure> Endpoint::first_failure() const {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  return first_failure_;
}

std::string Endpoint::how_it_ended(int r) const {
  return is_remote(r) ? "died or is out of reach (" + network_->problem_of(r) + ", " +
                            network_->address_of(r) + ")"
                      : "died";
}

void Endpoint::ring(int r) const {
  const Neighbour& neighbour = neighbours_[r];
  neighbour.bell->ring();
  if (neighbour.wake_event) {
    Network::wake(neighbour.wake_event.get(), 1);
  }
}

void Endpoint::sleep(uint32_t seen, int64_t nanoseconds) {
  if (network_) {
    network_->sleep(nanoseconds);
  } else {
    futex_wait(bell().rings, seen, nanoseconds);
  }
}

void Endpoint::wake_own_threads() {
  bell().ring();
  if (network_) {
    network_->wake(bell().asleep.load(std::memory_order_seq_cst));
  }
}

bool Endpoint::is_forked_copy() const { return fork_guard::generation() != fork_generation_; }

}  // namespace dpcore
