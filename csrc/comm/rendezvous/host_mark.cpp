// A rank that finds its own name taken (by another user, since names bear the job) cannot be found:
// it is alone on its host then, which is slower and just as right.
#include "comm/rendezvous/host_mark.h"

#include "comm/base/error.h"

namespace dpcore {

HostMark::HostMark(const Rendezvous& rendezvous, const std::string& label)
    : rendezvous_(rendezvous),
      label_(label),
      listener_(UnixSocket::listen_at(name_of(rendezvous.rank))) {}

std::string HostMark::name_of(int rank) const {
  return rendezvous_.name + "/" + label_ + "/" + std::to_string(rank);
}

int HostMark::lowest_in_reach() const {
  for (int r = 0; r < rendezvous_.rank && listener_; ++r) {
    const UnixSocket line = UnixSocket::connect_to(name_of(r));
    if (line && line.same_user()) {
      return r;
    }
  }
  return rendezvous_.rank;
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

Rendezvous local_rendezvous(const Rendezvous& rendezvous, const std::vector<int>& hosts) {
  const int lowest = hosts[static_cast<size_t>(rendezvous.rank)];
  Rendezvous local = rendezvous;
  local.name = rendezvous.name + "/local/" + std::to_string(lowest);
  local.world = 0;
  for (int r = 0; r < rendezvous.world; ++r) {
    if (hosts[static_cast<size_t>(r)] == lowest) {
      local.rank = r == rendezvous.rank ? local.world : local.rank;
      local.members.push_back(r);
      ++local.world;
    }
  }
  return local;
}

}  // namespace dpcore
