// Construction order matters: the header and the first control block are in place before the
// rendezvous, so a peer that maps the arena finds them.
#include "comm/group/endpoint.h"

#include <poll.h>
#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fault.h"
#include "comm/base/fnv.h"
#include "comm/base/processors.h"
#include "comm/base/switch.h"

namespace dpcore {
namespace {

// A peer that moves on by itself needs no help, and moving costs some 20 us.
constexpr int kMeetingsOnOneProcessor = 3;
constexpr int64_t kRestAfterLeavingNs = 10'000'000;

}  // namespace

uint64_t Endpoint::job_of(const std::string& name) { return Fnv().add(name).value(); }

std::shared_ptr<Endpoint> Endpoint::meet(RankKind how, const Rendezvous& rendezvous,
                                         const TcpOptions* tcp, size_t control_bytes,
                                         const std::function<void(std::byte*)>& prepare_control) {
  std::shared_ptr<Endpoint> self(new Endpoint);
  self->job_ = job_of(rendezvous.name);
  self->rank_ = rendezvous.rank;
  self->shares_process_ = how == RankKind::threads;
  self->arena_ = Arena::create(rendezvous.rank);
  self->control_block_ = self->arena_->allocate(control_bytes, 64);
  prepare_control(self->control_block_.get());

  ArenaHeader& header = self->arena_->header();
  header.magic = kControlMagic;
  header.version = kLayoutVersion;
  header.header_bytes = sizeof(ArenaHeader);
  header.process = getpid();
  header.root_control_offset = self->arena_->offset_of(self->control_block_.get(), control_bytes);
  header.address = reinterpret_cast<uint64_t>(&header);
  if (getrandom(&header.token, sizeof(header.token), 0) != sizeof(header.token)) {
    header.token = 0;  // then no peer reads this rank's memory
  }

  fault::reach(fault::Point::init, rendezvous.rank, 0);
  std::vector<LocalPeer> present;
  if (rendezvous.world == 1) {
    present.resize(1);
  } else if (tcp != nullptr) {
    self->connect(how, rendezvous, *tcp, present);
  } else {
    present = how == RankKind::threads ? meet_inproc(rendezvous, self->arena_)
                                       : meet_unix(rendezvous, *self->arena_);
    for (int r = 0; r < rendezvous.world; ++r) {
      self->count_if_sharer(r, present[r].process);
    }
  }
  self->oversubscribed_ = self->sharers_ > usable_processors();
  self->costs_ = rendezvous.world == 1 ? rendezvous.costs : present[0].costs;
  if (self->peers_.empty()) {
    self->peers_ = std::vector<Peer>(rendezvous.world);
  }
  for (int r = 0; r < rendezvous.world; ++r) {
    self->take_in(r, present[r]);
  }
  self->reads_local_peers_ = self->try_to_read_local_peers();
  return self;
}

// Threads of one process go by the stage, like processes that may not read each other.
bool Endpoint::try_to_read_local_peers() {
  if (!switch_of("DPCORE_READ_PEERS").value_or(true) || shares_process_) {
    return false;
  }
  for (int r = 0; r < world(); ++r) {
    if (r == rank_ || is_remote(r)) {
      continue;
    }
    const ArenaHeader& header = peers_[r].view->header();
    peers_[r].readable = {process_of(r), header.address + offsetof(ArenaHeader, token),
                          header.token};
    if (!can_read(peers_[r].readable)) {
      return false;
    }
  }
  return true;
}

void Endpoint::count_if_sharer(int r, int32_t process) {
  if (r != rank_ && (shares_process_ || may_meet(process))) {
    ++sharers_;
  }
}

void Endpoint::connect(RankKind how, const Rendezvous& rendezvous, const TcpOptions& tcp,
                       std::vector<LocalPeer>& present) {
  Descriptor wake_event = Network::make_wake_event();
  std::vector<RendezvousPeer> peers = meet_tcp(rendezvous, tcp, [&](const Rendezvous& local) {
    return how == RankKind::threads ? meet_inproc(local, arena_, wake_event.get())
                                    : meet_unix(local, *arena_, wake_event.get());
  });
  const auto machine_of = [](const std::string& address) {
    return address.substr(0, address.rfind(':'));
  };
  present.resize(peers.size());
  peers_ = std::vector<Peer>(peers.size());
  address_ = peers[rank_].address;
  bool needs_network = false;
  is_one_machine_ = tcp.host_label.empty();
  for (size_t r = 0; r < peers.size(); ++r) {
    present[r] = std::move(peers[r].memory);
    present[r].process = peers[r].process;
    present[r].costs = peers[r].costs;
    peers_[r].host = peers[r].host;
    needs_network |= peers[r].is_remote();
    // Ranks that do not share memory here may share processors all the same.
    if (machine_of(peers[r].address) == machine_of(peers[rank_].address)) {
      count_if_sharer(static_cast<int>(r), peers[r].process);
    } else {
      is_one_machine_ = false;
    }
  }
  if (needs_network) {
    std::vector<TcpPeer> connected(std::make_move_iterator(peers.begin()),
                                   std::make_move_iterator(peers.end()));
    network_ = std::make_unique<Network>(rank_, std::move(connected), std::move(wake_event));
  }
}

// What is taken over is removed from `present`.
void Endpoint::take_in(int r, LocalPeer& present) {
  Peer& peer = peers_[r];
  peer.process = r == rank_ ? getpid() : present.process;
  peer.wake_event = std::move(present.wake_event);
  if (r == rank_) {
    peer.view = ArenaView::of(arena_);
  } else if (present.local) {
    peer.view = ArenaView::of(present.local);
  } else if (present.memfd) {
    peer.pidfd = std::move(present.pidfd);
    peer.view = ArenaView::map(std::exchange(present.memfd, {}), present.first_bytes);
  } else {  // remote
    peer.bell = &bell_of_remote_;
    return;
  }
  peer.bell = &peer.view->header().bell;
}

uint64_t Endpoint::root_control_offset_of(int r) const {
  return is_remote(r) ? 0 : peers_[r].view->header().root_control_offset;
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
          peers_[ranks[i]].dead.store(true, std::memory_order_release);
        }
      }
    }
    filled = 0;
  };
  for (int r = 0; r < world(); ++r) {
    if (peers_[r].pidfd && !dead(r)) {
      entries[filled] = {peers_[r].pidfd.get(), POLLIN, 0};
      ranks[filled] = r;
      if (++filled == kBatch) {
        ask();
      }
    }
  }
  ask();
  for (int r = 0; r < world(); ++r) {
    if (is_remote(r) && network_->is_lost(r)) {
      peers_[r].dead.store(true, std::memory_order_release);
    }
  }
}

void Endpoint::drop_pages_of_ended(size_t control_bytes) {
  for (int r = 0; r < world(); ++r) {
    if (dead(r) && !is_remote(r)) {
      peers_[r].view->drop_pages(root_control_offset_of(r) + control_bytes);
    }
  }
}

std::string Endpoint::how_it_ended(int r) const {
  return is_remote(r) ? "died or is out of reach (" + network_->problem_of(r) + ", " +
                            network_->address_of(r) + ")"
                      : "died";
}

void Endpoint::ring(int r) const {
  const Peer& peer = peers_[r];
  peer.bell->ring();
  if (peer.wake_event) {
    // A token for each thread that sleeps there: only one of them may be able to go on.
    Network::wake(peer.wake_event.get(), std::max(1u, peer.bell->asleep.load()));
  }
}

void Endpoint::sleep(uint32_t seen, int64_t nanoseconds) {
  if (network_) {
    network_->sleep(nanoseconds);
  } else {
    futex_wait(bell().rings, seen, nanoseconds);
  }
}

int Endpoint::record_processor() {
  const int here = sched_getcpu();
  bell().record_processor(here);
  return here;
}

bool Endpoint::part_from_peers() {
  const int here = record_processor();
  for (int r = 0; r < world(); ++r) {
    if (r != rank_ && peers_[r].bell->processor.load(std::memory_order_relaxed) == here) {
      return leaves_peers();  // the bell of remote ranks has no processor
    }
  }
  meetings_here_ = 0;
  return true;
}

// A peer records its processor when it comes, and rings a rank that sleeps: only then is it known
// anew.
bool Endpoint::leaves_peers() {
  const uint32_t rings = bell().rings.load(std::memory_order_relaxed);
  meetings_here_ += rings != rings_then_ ? 1 : 0;
  rings_then_ = rings;
  if (meetings_here_ < kMeetingsOnOneProcessor || now_ns() < leaves_again_ns_) {
    return false;
  }
  meetings_here_ = 0;
  leaves_again_ns_ = now_ns() + kRestAfterLeavingNs;
  cpu_set_t theirs;
  CPU_ZERO(&theirs);
  for (int r = 0; r < world(); ++r) {
    const int there = peers_[r].bell->processor.load(std::memory_order_relaxed);
    if (r != rank_ && there >= 0) {
      CPU_SET(there, &theirs);
    }
  }
  if (!leave_processors(theirs)) {
    return false;
  }
  record_processor();
  return true;
}

void Endpoint::wake_own_threads() {
  bell().ring();
  if (network_) {
    network_->wake(bell().asleep.load(std::memory_order_seq_cst));
  }
}

}  // namespace dpcore
