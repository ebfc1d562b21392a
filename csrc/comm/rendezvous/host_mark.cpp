// A rank that finds its own name taken (by another user, since names bear the job) cannot be found:
// it is alone on its host then, which is slower and just as right.
#include "comm/rendezvous/host_mark.h"

#include "comm/base/error.h"

namespace dpcore {

HostMark::HostMark(const MeetingPlace& place, const std::string& label)
    : place_(place), label_(label), listener_(UnixSocket::listen_at(name_of(place.rank))) {}

std::string HostMark::name_of(int rank) const {
  return place_.name + "/" + label_ + "/" + std::to_string(rank);
}

int HostMark::lowest_in_reach() const {
  for (int r = 0; r < place_.rank && listener_; ++r) {
    const UnixSocket line = UnixSocket::connect_to(name_of(r));
    if (line && line.same_user()) {
      return r;
    }
  }
  return place_.rank;
}

void check_hosts(const std::vector<int>& hosts) {
  for (size_t r = 0; r < hosts.size(); ++r) {
    const int lowest = hosts[r];
    const bool exists = lowest >= 0 && lowest <= static_cast<int>(r);
    if (!exists || hosts[static_cast<size_t>(lowest)] != lowest) {
      throw RendezvousError(
          "rank " + std::to_string(r) + " shares a host with rank " + std::to_string(lowest) +
          ", which does not share one with the ranks that it should; give transport='tcp' to all");
    }
  }
}

MeetingPlace place_of_mates(const MeetingPlace& place, const std::vector<int>& hosts) {
  const int lowest = hosts[static_cast<size_t>(place.rank)];
  MeetingPlace mates = place;
  mates.name = place.name + "/mates/" + std::to_string(lowest);
  mates.world = 0;
  for (int r = 0; r < place.world; ++r) {
    if (hosts[static_cast<size_t>(r)] == lowest) {
      mates.rank = r == place.rank ? mates.world : mates.rank;
      mates.members.push_back(r);
      ++mates.world;
    }
  }
  return mates;
}

}  // namespace dpcore
