// Ranks as threads meet at a table of this process. A finished or failed meeting is taken off
// the table by the last rank that leaves it, so a name can be used again.
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "comm/base/clock.h"
#include "comm/base/descriptor.h"
#include "comm/base/error.h"
#include "comm/rendezvous/rendezvous.h"

namespace dpcore {
namespace {

struct Meeting {
  int world = 0;
  int inside = 0;
  int arrived = 0;
  bool failed = false;
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<CostConstants> costs;
  std::vector<Descriptor> wake_events;  // copies, and copied for every rank that needs one
};

std::mutex table_mutex;
std::condition_variable table_changed;
std::map<std::string, std::shared_ptr<Meeting>>& table() {
  static auto* meetings = new std::map<std::string, std::shared_ptr<Meeting>>;
  return *meetings;
}

std::string missing_ranks(const Meeting& meeting) {
  std::string list;
  for (int r = 0; r < meeting.world; ++r) {
    if (!meeting.arenas[r]) {
      list += (list.empty() ? "" : ", ") + std::to_string(r);
    }
  }
  return list;
}

}  // namespace

std::vector<Presence> meet_inproc(const MeetingPlace& place, std::shared_ptr<Arena> arena,
                                  int wake_event) {
  std::unique_lock<std::mutex> lock(table_mutex);
  auto& entry = table()[place.name];
  if (!entry) {
    entry = std::make_shared<Meeting>();
    entry->world = place.world;
    entry->arenas.resize(place.world);
    entry->costs.resize(place.world);
    entry->wake_events.resize(place.world);
  }
  const std::shared_ptr<Meeting> meeting = entry;
  if (meeting->world != place.world) {
    throw RendezvousError("rank " + std::to_string(place.rank) + ": world size " +
                          std::to_string(place.world) + " here, " + std::to_string(meeting->world) +
                          " on the ranks that came before");
  }
  if (meeting->arenas[place.rank]) {
    throw RendezvousError("rank " + std::to_string(place.rank) + " came twice to '" + place.name +
                          "'; give every thread a rank of its own");
  }
  meeting->arenas[place.rank] = std::move(arena);
  meeting->costs[place.rank] = place.costs;
  meeting->wake_events[place.rank] = Descriptor(wake_event < 0 ? -1 : dup(wake_event));
  ++meeting->arrived;
  ++meeting->inside;
  table_changed.notify_all();

  const auto leave = [&] {
    if (--meeting->inside == 0) {
      table().erase(place.name);
    }
  };
  while (meeting->arrived < meeting->world && !meeting->failed) {
    table_changed.wait_for(lock, std::chrono::milliseconds(20));
    if (now_ns() > place.deadline_ns) {
      meeting->failed = true;
    }
    try {
      if (place.interrupted) {
        lock.unlock();
        place.interrupted();
        lock.lock();
      }
    } catch (...) {
      lock.lock();
      meeting->failed = true;
      leave();
      table_changed.notify_all();
      throw;
    }
  }
  if (meeting->arrived < meeting->world) {
    const std::string missing = missing_ranks(*meeting);
    leave();
    table_changed.notify_all();
    throw RendezvousError("rank " + std::to_string(place.rank) + ": " +
                          std::to_string(meeting->arrived) + " of " +
                          std::to_string(meeting->world) + " ranks came; missing: " + missing);
  }
  std::vector<Presence> peers(place.world);
  for (int r = 0; r < place.world; ++r) {
    peers[r].rank = r;
    peers[r].process = getpid();
    peers[r].costs = meeting->costs[r];
    if (r != place.rank) {
      peers[r].local = meeting->arenas[r];
      const Descriptor& event = meeting->wake_events[r];
      peers[r].wake_event = event ? dup(event.get()) : -1;
    }
  }
  leave();
  return peers;
}

}  // namespace dpcore
