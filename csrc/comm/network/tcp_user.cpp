// One question to the kernel by a netlink socket, and its answer.
#include "comm/network/tcp_user.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>

#include <cstring>

namespace dpcore {
namespace {

struct Question {
  nlmsghdr header;
  inet_diag_req_v2 request;
};

struct Answer {  // attributes follow, which are of no interest
  nlmsghdr header;
  inet_diag_msg socket;
};

void put_address(const TcpAddress& address, __be16& port, __be32 (&host)[4]) {
  if (address.family() == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(address.get());
    port = in->sin_port;
    std::memcpy(host, &in->sin_addr, sizeof(in->sin_addr));
  } else {
    const auto* in = reinterpret_cast<const sockaddr_in6*>(address.get());
    port = in->sin6_port;
    std::memcpy(host, &in->sin6_addr, sizeof(in->sin6_addr));
  }
}

}  // namespace

std::optional<uid_t> user_of_peer(const TcpSocket& connection) {
  const TcpAddress there = connection.peer_address();
  const TcpAddress here = connection.local_address();
  Question question{};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.request.sdiag_family = static_cast<uint8_t>(there.family());
  question.request.sdiag_protocol = IPPROTO_TCP;
  inet_diag_sockid& id = question.request.id;
  put_address(there, id.idiag_sport, id.idiag_src);
  put_address(here, id.idiag_dport, id.idiag_dst);
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

  const Descriptor line(socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  std::byte received[1024];
  if (!line || ::send(line.get(), &question, sizeof(question), 0) != sizeof(question) ||
      ::recv(line.get(), received, sizeof(received), MSG_DONTWAIT) <
          static_cast<ssize_t>(sizeof(Answer))) {
    return std::nullopt;
  }
  Answer answer;
  std::memcpy(&answer, received, sizeof(answer));
  // Where there is no such connection the kernel tells of whatever listens there. A socket without
  // an inode is no process's (any more), and what the kernel says of its user means nothing.
  const inet_diag_sockid& found = answer.socket.id;
  const bool is_peer = answer.header.nlmsg_type == SOCK_DIAG_BY_FAMILY &&
                       found.idiag_sport == id.idiag_sport && found.idiag_dport == id.idiag_dport &&
                       answer.socket.idiag_inode != 0;
  return is_peer ? std::optional<uid_t>(answer.socket.idiag_uid) : std::nullopt;
}

}  // namespace dpcore
